// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What reader threads have to say while they go on: for the log of whoever waits for them.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace cpudist::data {

// Any thread.
class Notices {
 public:
  using Tell = std::function<void(const std::string&)>;

  // With `tell` nothing is kept: it is called by the thread that has something to say.
  explicit Notices(Tell tell = {}) : tell_(std::move(tell)) {}

  void add(std::string text) {
    if (tell_) {
      tell_(text);
      return;
    }
    const std::lock_guard lock(mutex_);
    texts_.push_back(std::move(text));
    any_.store(true, std::memory_order_release);
  }
  // Costs no lock.
  bool any() const { return any_.load(std::memory_order_acquire); }
  // Each once, in their order.
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex_);
    any_.store(false, std::memory_order_release);
    return std::exchange(texts_, {});
  }

 private:
  const Tell tell_;
  std::mutex mutex_;
  std::vector<std::string> texts_;
  std::atomic<bool> any_{false};
};

}  // namespace cpudist::data
