// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What other threads (of Python: decompressors, Parquet readers) hand to a lane, file after file,
// in bounded memory.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/wait.h"
#include "data/parse/columns.h"
#include "data/read/byte_source.h"

namespace cpudist::data {

// One feeder and one reader at a time.
class FedQueue {
 public:
  struct End {};  // of a file
  struct Failure {
    std::string message;
  };
  using Item = std::variant<std::string, ColumnRecords, End, Failure>;

  explicit FedQueue(size_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Waits for room; one item is always taken when the queue is empty. False: stopped, the item was
  // dropped. Throws Error kTimeout or kInterrupted.
  bool push(Item item, const Wait& wait);
  // The same, in pieces that fit.
  bool push_bytes(std::string_view bytes, const Wait& wait);
  // Waits for an item; throws Error(kClosed) when stopped.
  Item pop();
  // Waits like pop() and leaves the item where it is.
  bool next_is_columns();
  // Ends all waits, now and later.
  void stop() noexcept;
  size_t held_bytes() const;

 private:
  static size_t bytes_of(const Item& item);
  void await_item(std::unique_lock<std::mutex>& lock);

  const size_t limit_bytes_;
  mutable std::mutex mutex_;
  ConditionVariable room_;
  ConditionVariable filled_;
  std::deque<Item> items_;
  size_t bytes_ = 0;
  bool stopped_ = false;
};

// The text of the file that is being fed.
class FedBytes : public ByteSource {
 public:
  FedBytes(FedQueue& queue, const std::string& path) : queue_(queue), path_(path) {}
  size_t read(char* to, size_t size) override;

 private:
  FedQueue& queue_;
  std::string path_;
  std::string piece_;
  size_t used_ = 0;
  bool ended_ = false;
};

// The columns of the file that is being fed; nullopt at its end. Throws like FedBytes::read.
std::optional<ColumnRecords> next_columns(FedQueue& queue, const std::string& path);

// One queue per lane, as callers see them; none when the input is not fed. Any thread.
class Feeds {
 public:
  Feeds(const Schema& schema, size_t lanes, bool fed, size_t lane_limit_bytes);

  // Null when the input is not fed.
  FedQueue* of_lane(size_t lane) { return queues_.empty() ? nullptr : queues_[lane].get(); }
  // One thread per lane, file after file. Wait while the lane's queue is full; false once nothing
  // of the lane is read any more.
  bool bytes(size_t lane, std::string_view bytes, const Wait& wait);
  bool columns(size_t lane, size_t rows, std::span<const ColumnValues> columns, const Wait& wait);
  bool end_of_file(size_t lane, const Wait& wait);
  bool failure(size_t lane, const std::string& message, const Wait& wait);
  void stop() noexcept;

 private:
  FedQueue& at(size_t lane);

  const Schema& schema_;
  std::vector<std::unique_ptr<FedQueue>> queues_;
};

}  // namespace cpudist::data
