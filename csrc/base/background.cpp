// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "base/background.h"

#include <utility>

#include "base/threads.h"

namespace cpudist {

Background::Background(std::string purpose) : purpose_(std::move(purpose)) {}

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  put_.notify_all();
  if (thread_.joinable()) join_thread(thread_);
}

void Background::put(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = start_io_thread(purpose_, [this] { work(); });
  tasks_.push_back(std::move(task));
  put_.notify_all();
}

void Background::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    put_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds goes without the lock
    lock.lock();
  }
}

}  // namespace cpudist
