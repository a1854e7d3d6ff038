// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Batches out of a store, made ahead of their consumers by several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/wait.h"
#include "data/read/batch_pool.h"
#include "data/read/waiting.h"
#include "data/store/content.h"

namespace cpudist::data {

struct StoreReaderOptions {
  size_t batch_size = 0;
  bool drop_last = false;
  uint64_t begin_record = 0;  // in the store's order; the first batch begins there
  size_t threads = 1;
  size_t buffer_bytes = 64 << 20;  // of batches made ahead; one is always allowed
};

struct StoreBatch {
  std::shared_ptr<Batch> batch;  // null at the end
  uint64_t records_before = 0;   // and in it: where to begin to go on after it
};

// Gives the batches of one pass over the order that the store had when it was made.
class StoreReader {
 public:
  // Throws Error(kInvalidArgument).
  StoreReader(const Schema& schema, std::shared_ptr<const Content> content,
              std::shared_ptr<const Order> order, const StoreReaderOptions& options,
              std::shared_ptr<BatchPool> pool);
  ~StoreReader();
  StoreReader(const StoreReader&) = delete;
  StoreReader& operator=(const StoreReader&) = delete;

  // Any number of threads; each batch goes to one of them, in sequence. Throws Error:
  // kTimeout, kInterrupted, kClosed after stop().
  StoreBatch next(const Wait& wait);
  uint64_t position() const;  // records before the next batch
  const Schema& schema() const { return schema_; }
  void stop();

 private:
  uint64_t batch_count() const;
  void run() noexcept;
  void produce();
  bool may_begin() const;  // with the lock

  const Schema schema_;
  const std::shared_ptr<const Content> content_;  // owns what the order points to
  const std::shared_ptr<const Order> order_;
  const StoreReaderOptions options_;
  const std::shared_ptr<BatchPool> pool_;
  const uint64_t batches_;

  mutable std::mutex mutex_;
  ConditionVariable ready_;
  ConditionVariable room_;
  std::map<uint64_t, std::shared_ptr<Batch>> made_;
  uint64_t begun_ = 0;      // batches that threads have taken up
  uint64_t delivered_ = 0;  // batches that consumers have got
  size_t made_bytes_ = 0;
  size_t largest_bytes_ = 0;
  bool stopped_ = false;
  std::exception_ptr error_;

  std::mutex join_mutex_;
  std::vector<std::thread> threads_;
};

}  // namespace cpudist::data
