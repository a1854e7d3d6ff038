// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Reads files into slabs with several threads. What comes out depends on the files only: it is put
// in the order of files and of bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/wait.h"
#include "data/read/split_reader.h"
#include "data/read/waiting.h"
#include "data/store/content.h"

namespace cpudist::data {

struct LoadOptions {
  Input input;
  // One thread per lane. Fed lanes read their own splits, in order; otherwise threads take splits
  // as they get free.
  std::vector<std::vector<Split>> lanes;
  size_t buffer_bytes = 64 << 20;  // of what is fed and not yet read, all lanes together
  BadLinePolicy policy = BadLinePolicy::kRaise;
  std::string quarantine;
};

struct LoadProgress {
  uint64_t records = 0;
  uint64_t size_bytes = 0;  // of records
  uint64_t splits_done = 0;
  uint64_t splits = 0;
};

class StoreLoader {
 public:
  // Starts to read; `schema` outlives it. Throws Error.
  StoreLoader(const Schema& schema, LoadOptions options);
  ~StoreLoader();
  StoreLoader(const StoreLoader&) = delete;
  StoreLoader& operator=(const StoreLoader&) = delete;

  // Until all is read. Throws Error: of the load, kTimeout when nothing more was read for
  // the wait's timeout, kInterrupted, kClosed.
  void wait(const Wait& wait);
  // After wait(), once.
  std::vector<Slab> take_slabs();
  LoadProgress progress() const;
  Feeds& feeds() { return feeds_; }
  BadLines& bad_lines() { return bad_lines_; }
  Notices& notices() { return notices_; }
  void stop();

 private:
  // A split and where its records go.
  struct Task {
    Split split;
    size_t rank = 0;
  };

  std::vector<std::vector<Task>> ranked_tasks() const;
  void run(size_t lane) noexcept;
  void read_tasks(size_t lane);
  void read_task(SplitReader& reader, const Task& task, RecordBuffer& buffer);
  void fail(std::exception_ptr cause) noexcept;
  bool wait_for_progress(std::unique_lock<std::mutex>& lock, const Wait& wait);
  std::string slow_text(double timeout_s) const;

  const Schema& schema_;
  const LoadOptions options_;
  BadLines bad_lines_;
  Notices notices_;
  StopSignal stop_;
  Feeds feeds_;
  std::vector<std::vector<Task>> tasks_;  // per lane if fed, else one list for all
  std::atomic<size_t> next_task_{0};
  std::vector<std::vector<Slab>> slabs_;  // by rank
  std::atomic<uint64_t> records_{0};
  std::atomic<uint64_t> words_{0};
  std::atomic<uint64_t> splits_done_{0};

  mutable std::mutex mutex_;
  ConditionVariable ended_;
  size_t running_ = 0;
  bool stopped_ = false;
  std::exception_ptr error_;
  std::vector<Split> reading_;  // per lane, for messages

  std::mutex join_mutex_;
  std::vector<std::thread> threads_;
};

}  // namespace cpudist::data
