// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Who says which thread runs next and what time it is, for threads that are simulated. Clocks,
// waits and threads of this folder ask it, where the calling thread belongs to one; else the
// system.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

namespace cpudist {

// The threads of a schedule run one at a time. One hands on to another where it waits, for others
// or for time, and where it ends; never at a mutex. So none may wait with a mutex held that another
// one takes meanwhile. Threads that they start belong to it, too.
class Schedule {
 public:
  using Time = std::chrono::steady_clock::time_point;

  Schedule() = default;
  virtual ~Schedule() = default;
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  virtual Time now() noexcept = 0;
  // Others run until somebody calls notify(on), or it is `deadline`: false then.
  virtual bool wait(const void* on, Time deadline) noexcept = 0;
  // Wakes one of those who wait, or all; the caller goes on.
  virtual void notify(const void* on, bool all) noexcept = 0;

  // ---- threads ----
  // The caller is about to start one, whose number is returned, and has started it.
  virtual uint64_t add(const std::string& purpose) = 0;
  virtual void started(uint64_t thread, std::thread::id id) noexcept = 0;
  // By that one: returns when it is its turn; others run from end() on.
  virtual void begin(uint64_t thread) noexcept = 0;
  virtual void end() noexcept = 0;
  // Others run until this one has ended.
  virtual void wait_for_end(std::thread::id id) noexcept = 0;
};

// That of the calling thread; null in all but tests.
inline constinit thread_local Schedule* thread_schedule = nullptr;

// While it lives, the calling thread, which a schedule knows by this number, belongs to it.
class ScheduledThread {
 public:
  ScheduledThread(Schedule& schedule, uint64_t thread) : schedule_(schedule) {
    schedule.begin(thread);
    thread_schedule = &schedule;
  }
  ~ScheduledThread() {
    thread_schedule = nullptr;
    schedule_.end();
  }
  ScheduledThread(const ScheduledThread&) = delete;
  ScheduledThread& operator=(const ScheduledThread&) = delete;

 private:
  Schedule& schedule_;
};

}  // namespace cpudist
