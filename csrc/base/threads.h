// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Starts threads, and says what to set when the system refuses one; waits for their ends.
#pragma once

#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/errors.h"
#include "base/schedule.h"

namespace cpudist {

// Throws Error(kInvalidArgument) when the system has no thread left.
template <typename Body>
std::thread start_thread(const std::string& purpose, Body&& body) {
  try {
    Schedule* const schedule = thread_schedule;
    if (schedule == nullptr) return std::thread(std::forward<Body>(body));
    const uint64_t number = schedule->add(purpose);
    std::thread thread(
        [schedule, number, body = std::decay_t<Body>(std::forward<Body>(body))]() mutable {
          const ScheduledThread turn(*schedule, number);
          body();
        });
    schedule->started(number, thread.get_id());
    return thread;
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kInvalidArgument,
                "cannot start " + purpose + ": " + error.what() +
                    "; set CPUDIST_SERVER_THREADS or the threads of datasets lower, or allow this "
                    "process more threads and memory (ulimit -u, ulimit -v, the container's "
                    "limits)");
  }
}

// Returns when it has ended.
inline void join_thread(std::thread& thread) {
  if (thread_schedule != nullptr) thread_schedule->wait_for_end(thread.get_id());
  thread.join();
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
