// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Several callers at once.
#pragma once

#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace cpudist::testing {

// Runs every call in a thread of its own and rethrows the first failure.
inline void run_all(const std::vector<std::function<void()>>& calls) {
  std::vector<std::exception_ptr> failures(calls.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < calls.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        calls[i]();
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace cpudist::testing
