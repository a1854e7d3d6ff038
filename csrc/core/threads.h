// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Starts threads, and says what to set when the system refuses one.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/errors.h"

namespace cpudist::core {

// Throws Error(kInvalidArgument) when the system has no thread left.
template <typename Body>
std::thread start_thread(const std::string& purpose, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kInvalidArgument,
                "cannot start " + purpose + ": " + error.what() +
                    "; set CPUDIST_SERVER_THREADS lower, or allow this process more threads and "
                    "memory (ulimit -u, ulimit -v, the container's limits)");
  }
}

}  // namespace cpudist::core
