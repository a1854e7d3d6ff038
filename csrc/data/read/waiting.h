// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How callers wait for reader threads: with a deadline, looking for an interrupt every 50 ms. And
// how reader threads that wait for a command are told to stop.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <string>

#include "base/clock.h"
#include "base/errors.h"
#include "base/wait.h"

namespace cpudist::data {

inline constexpr auto kPollInterval = std::chrono::milliseconds(50);

struct Wait {
  double timeout_s = 0.0;
  // Called without locks, about every 50 ms; true ends the wait with kInterrupted. May be empty.
  std::function<bool()> interrupted;
};

// A year is as good as for ever and does not overflow the clock.
inline Clock::time_point deadline_of(const Wait& wait) {
  const std::chrono::duration<double> timeout(std::clamp(wait.timeout_s, 0.0, 3.2e7));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
}

// Waits with `lock` held until `done()`. Throws Error kTimeout with the text of `describe()`,
// called with the lock, or kInterrupted.
template <typename Done, typename Describe>
void wait_until(std::unique_lock<std::mutex>& lock, ConditionVariable& changed, const Wait& wait,
                const Done& done, const Describe& describe) {
  if (done()) return;
  const Clock::time_point deadline = deadline_of(wait);
  while (true) {
    const Clock::time_point now = Clock::now();
    if (now >= deadline) throw Error(ErrorCode::kTimeout, describe());
    changed.wait_until(lock, std::min(deadline, now + kPollInterval), done);
    if (done()) return;
    if (!wait.interrupted) continue;
    lock.unlock();
    const bool interrupted = wait.interrupted();
    lock.lock();
    if (interrupted) {
      throw Error(ErrorCode::kInterrupted, "the wait was interrupted by a signal");
    }
  }
}

// Throws to a caller what ended a thread that works for it, called `who`: as Error, kOutOfMemory
// for memory that ran out. The thread keeps no more than the exception, which needs no memory.
[[noreturn]] void throw_failure(const std::exception_ptr& cause, const std::string& who);

inline std::string seconds_text(double seconds) {
  std::string text = std::to_string(seconds);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// Raised once, never lowered. Its descriptor becomes readable, for poll().
class StopSignal {
 public:
  StopSignal();  // throws Error(kDataFile) when the process has no descriptor left
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  void raise() noexcept;
  bool raised() const { return raised_.load(std::memory_order_acquire); }
  void check() const;  // throws Error(kClosed) once raised
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_ = -1;
  std::atomic<bool> raised_{false};
};

}  // namespace cpudist::data
