// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Waiting: for another thread, or for time to pass. The only place that does either, with the times
// of base/clock.h. Waits for the system are elsewhere, in the files that WAITS_FOR_THE_SYSTEM of
// scripts/tidy_rules/text.py names: for sockets, the pipes of commands, futexes of other processes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/schedule.h"

namespace cpudist {

// What std::condition_variable is, on the library's clock. Waits without a condition may end early.
class ConditionVariable {
 public:
  using Lock = std::unique_lock<std::mutex>;

  void notify_one() noexcept {
    if (thread_schedule != nullptr) return thread_schedule->notify(this, false);
    variable_.notify_one();
  }
  void notify_all() noexcept {
    if (thread_schedule != nullptr) return thread_schedule->notify(this, true);
    variable_.notify_all();
  }

  void wait(Lock& lock) {
    if (thread_schedule != nullptr) return static_cast<void>(hand_on(lock, TimePoint::max()));
    variable_.wait(lock);
  }
  template <typename Done>
  void wait(Lock& lock, Done done) {
    while (!done()) wait(lock);
  }

  // False where it was the deadline that ended it.
  bool wait_until(Lock& lock, TimePoint deadline) {
    if (thread_schedule != nullptr) return hand_on(lock, deadline);
    return variable_.wait_until(lock, deadline) == std::cv_status::no_timeout;
  }
  // Returns what done() is at the end.
  template <typename Done>
  bool wait_until(Lock& lock, TimePoint deadline, Done done) {
    while (!done()) {
      if (!wait_until(lock, deadline)) return done();
    }
    return true;
  }

  template <typename Rep, typename Period>
  void wait_for(Lock& lock, std::chrono::duration<Rep, Period> limit) {
    wait_until(lock, Clock::now() + std::chrono::ceil<Clock::duration>(limit));
  }
  template <typename Rep, typename Period, typename Done>
  bool wait_for(Lock& lock, std::chrono::duration<Rep, Period> limit, Done done) {
    return wait_until(lock, Clock::now() + std::chrono::ceil<Clock::duration>(limit), done);
  }

 private:
  // The threads of a schedule run one at a time: nobody is told between the two.
  bool hand_on(Lock& lock, TimePoint deadline) {
    lock.unlock();
    const bool told = thread_schedule->wait(this, deadline);
    lock.lock();
    return told;
  }

  std::condition_variable variable_;
};

// Nothing but time ends it: for the few things that nobody can announce.
inline void let_pass(Clock::duration time) {
  if (thread_schedule == nullptr) return std::this_thread::sleep_for(time);
  thread_schedule->wait(nullptr, Clock::now() + time);
}

}  // namespace cpudist
