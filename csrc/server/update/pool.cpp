// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Tasks are taken from a shared counter; a generation number tells helpers of a new batch.

#include "server/update/pool.h"

#include <string>

#include "base/threads.h"

namespace cpudist::server {

UpdatePool::UpdatePool(uint32_t threads) {
  const uint32_t count = threads > 1 ? threads - 1 : 0;
  helpers_.reserve(count);
  try {
    for (uint32_t i = 1; i <= count; ++i) {
      const std::string name =
          "update thread " + std::to_string(i) + " of " + std::to_string(count);
      helpers_.push_back(start_thread(name, [this] { help(); }));
    }
  } catch (...) {
    stop();  // no destructor runs, and those that were started wait for work
    throw;
  }
}

UpdatePool::~UpdatePool() { stop(); }

void UpdatePool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) join_thread(helper);
}

void UpdatePool::run(size_t count, const std::function<void(size_t)>& task) {
  std::unique_lock helpers(run_mutex_, std::defer_lock);
  if (count < 2 || helpers_.empty() || !helpers.try_lock()) {
    run_alone(count, task);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    task_ = &task;
    count_ = count;
    next_.store(0);
    running_ = helpers_.size();
    error_ = nullptr;
    failed_ = count;
    ++generation_;
  }
  wake_.notify_all();
  work();
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return running_ == 0; });
  task_ = nullptr;
  if (error_) std::rethrow_exception(error_);
}

void UpdatePool::run_alone(size_t count, const std::function<void(size_t)>& task) {
  std::exception_ptr error;
  for (size_t i = 0; i < count; ++i) {
    try {
      task(i);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

void UpdatePool::help() {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
    if (stopping_) return;
    seen = generation_;
    lock.unlock();
    work();
    lock.lock();
    if (--running_ == 0) idle_.notify_one();
  }
}

void UpdatePool::work() noexcept {
  for (size_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
    try {
      (*task_)(i);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (i >= failed_) continue;
      failed_ = i;
      error_ = std::current_exception();
    }
  }
}

}  // namespace cpudist::server
