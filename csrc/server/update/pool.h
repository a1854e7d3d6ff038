// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The threads that help the one that applies an update. They block on a condition variable between
// updates. Which thread runs a task changes no result: tasks share no row and no element.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/wait.h"

namespace cpudist::server {

class UpdatePool {
 public:
  // helpers = threads - 1. Throws Error(kInvalidArgument) when the system refuses one.
  explicit UpdatePool(uint32_t threads);
  ~UpdatePool();
  UpdatePool(const UpdatePool&) = delete;
  UpdatePool& operator=(const UpdatePool&) = delete;

  // Calls task(0) .. task(count - 1), each once, on the caller and the helpers; returns when all
  // are done, those after one that throws, too, and rethrows the exception of the lowest number.
  // Any thread; when the helpers are busy with another call, the caller does everything itself.
  void run(size_t count, const std::function<void(size_t)>& task);

 private:
  void stop();  // ends and joins the helpers
  void help();
  void work() noexcept;
  static void run_alone(size_t count, const std::function<void(size_t)>& task);

  std::mutex run_mutex_;  // held by the caller that has the helpers
  std::mutex mutex_;
  ConditionVariable wake_;
  ConditionVariable idle_;
  const std::function<void(size_t)>* task_ = nullptr;
  size_t count_ = 0;
  std::atomic<size_t> next_{0};
  uint64_t generation_ = 0;
  size_t running_ = 0;
  bool stopping_ = false;
  std::exception_ptr error_;  // of task failed_
  size_t failed_ = 0;
  std::vector<std::thread> helpers_;
};

}  // namespace cpudist::server
