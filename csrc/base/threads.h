// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Starts threads, and says what to set when the system refuses one.
#pragma once

#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/errors.h"

namespace cpudist {

// Throws Error(kInvalidArgument) when the system has no thread left.
template <typename Body>
std::thread start_thread(const std::string& purpose, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kInvalidArgument,
                "cannot start " + purpose + ": " + error.what() +
                    "; set CPUDIST_SERVER_THREADS or the threads of datasets lower, or allow this "
                    "process more threads and memory (ulimit -u, ulimit -v, the container's "
                    "limits)");
  }
}

// One that no signal interrupts: these belong to the threads of the program, whose handlers run in
// the main thread.
template <typename Body>
std::thread start_io_thread(const std::string& purpose, Body&& body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = start_thread(purpose, std::forward<Body>(body));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace cpudist
