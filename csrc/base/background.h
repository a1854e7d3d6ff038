// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A thread for what may take long, beside those that must not wait.
#pragma once

#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "base/wait.h"

namespace cpudist {

// Does one thing after the other, in a thread that begins with the first.
//
// Thread safety: all members.
class Background {
 public:
  explicit Background(std::string purpose);
  ~Background();  // everything that was put is done then
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // `task` throws nothing. Throws std::bad_alloc, and Error where there is no thread left; it is
  // not done then.
  void put(std::function<void()> task);

 private:
  void work();

  const std::string purpose_;
  std::mutex mutex_;  // of what follows
  ConditionVariable put_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace cpudist
