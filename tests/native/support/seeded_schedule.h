// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Threads whose order and time come from a seed: one runs until it waits, then one of those that
// can go on is drawn, and where none can, time goes on to the next deadline. The same seed gives
// the same run.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <semaphore>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/schedule.h"

namespace cpudist::testing {

// The thread that makes one belongs to it until its end, before which all others have ended.
class SeededSchedule final : public Schedule {
 public:
  explicit SeededSchedule(uint64_t seed) : random_(seed) {
    threads_.emplace_back().purpose = "the test";
    thread_schedule = this;
  }
  ~SeededSchedule() override { thread_schedule = nullptr; }

  // Others may run before the caller goes on, which holds no lock.
  void pause() noexcept { hand_on(threads_[running_]); }
  uint64_t below(uint64_t count) noexcept { return (random_() >> 11) % count; }
  // Of all that was decided so far.
  uint64_t digest() const { return digest_; }
  uint64_t decisions() const { return decisions_; }
  // When those that could have gone on did so again that were slow for long, last of all.
  Time slept_until() const { return slept_until_; }
  std::chrono::milliseconds passed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now_ - Time(kStart));
  }

  // What is called with who waits for what where no thread can go on, or they never end, before the
  // program is ended.
  void when_stuck(std::function<void(const std::string&)> told) { when_stuck_ = std::move(told); }

  // ---- processes ----
  // Threads are of a process: that of the thread which starts them, but for those that it starts
  // while one of these lives. Number 0 is that of the test.
  class Starting {
   public:
    Starting(SeededSchedule& schedule, uint32_t process)
        : starts_(schedule.threads_[schedule.running_].starts),
          before_(std::exchange(starts_, process)) {}
    ~Starting() { starts_ = before_; }
    Starting(const Starting&) = delete;
    Starting& operator=(const Starting&) = delete;

   private:
    uint32_t& starts_;
    const uint32_t before_;
  };
  // Its threads do not go on, whatever time it is. The caller's is another one.
  void freeze(uint32_t process) { frozen_.insert(process); }
  void thaw(uint32_t process) { frozen_.erase(process); }
  // All clocks go on by so much at once, as where the machine was suspended.
  void jump(std::chrono::milliseconds time) { now_ += time; }

  Time now() noexcept override { return now_; }
  bool wait(const void* on, Time deadline) noexcept override {
    Thread& me = threads_[running_];
    me.state = State::kWaiting;
    me.on = on;
    me.deadline = deadline;
    hand_on(me);
    return me.told;
  }
  void notify(const void* on, bool all) noexcept override {
    std::vector<Thread*> found;
    for (Thread& thread : threads_) {
      if (thread.state == State::kWaiting && thread.on == on) found.push_back(&thread);
    }
    if (found.empty()) return;
    if (!all) found = {found[below(found.size())]};
    for (Thread* thread : found) wake(*thread, true);
  }

  uint64_t add(const std::string& purpose) override {
    const uint32_t process = threads_[running_].starts;
    const std::lock_guard lock(growing_);
    Thread& thread = threads_.emplace_back();
    thread.purpose = purpose;
    thread.process = thread.starts = process;
    return threads_.size() - 1;
  }
  void started(uint64_t thread, std::thread::id id) noexcept override { threads_[thread].id = id; }
  void begin(uint64_t thread) noexcept override { place_of(thread).turn.acquire(); }
  void end() noexcept override {
    Thread& me = threads_[running_];
    me.state = State::kEnded;
    notify(&me, true);
    running_ = next();
    threads_[running_].turn.release();
  }
  void wait_for_end(std::thread::id id) noexcept override {
    for (size_t i = threads_.size(); i-- > 0;) {
      if (threads_[i].id != id) continue;
      while (threads_[i].state != State::kEnded) wait(&threads_[i], Time::max());
      return;
    }
  }

 private:
  enum class State { kReady, kWaiting, kEnded };
  struct Thread {
    std::string purpose;
    std::thread::id id;
    std::binary_semaphore turn{0};
    State state = State::kReady;
    const void* on = nullptr;
    Time deadline{};
    bool told = false;
    uint32_t process = 0;
    uint32_t starts = 0;  // the process of threads that it starts
  };
  static constexpr std::chrono::hours kStart{1};  // 0 means "no time" here and there
  static constexpr uint64_t kMostDecisions = 5'000'000;

  static void wake(Thread& thread, bool told) {
    thread.state = State::kReady;
    thread.told = told;
  }

  void hand_on(Thread& me) noexcept {
    const size_t chosen = next();
    if (&threads_[chosen] == &me) return;
    running_ = chosen;
    threads_[chosen].turn.release();
    me.turn.acquire();
  }

  // Whose turn it is. Now and then time passes though some could go on: they are slow.
  size_t next() noexcept {
    now_ += std::chrono::microseconds(1);
    while (true) {
      ready_.clear();
      Time soonest = Time::max();
      for (size_t i = 0; i < threads_.size(); ++i) {
        Thread& thread = threads_[i];
        if (frozen_.contains(thread.process)) continue;
        if (thread.state == State::kWaiting && thread.deadline <= now_) wake(thread, false);
        if (thread.state == State::kReady) ready_.push_back(i);
        if (thread.state == State::kWaiting) soonest = std::min(soonest, thread.deadline);
      }
      const bool waits = soonest != Time::max();
      if (ready_.empty() && !waits) stop("nobody can go on");
      if (ready_.empty() || (waits && below(kSlow) == 0)) {
        if (!ready_.empty() && soonest - now_ > kLong) slept_until_ = soonest;
        now_ = soonest;
        continue;
      }
      const size_t chosen = ready_[below(ready_.size())];
      const auto time = static_cast<uint64_t>(now_.time_since_epoch().count());
      digest_ = (digest_ ^ (chosen + 1) ^ (time << 8)) * 0x9e3779b97f4a7c15u;
      digest_ ^= digest_ >> 29;
      if (++decisions_ > kMostDecisions) stop("it does not end");
      return chosen;
    }
  }

  // Its threads can neither go on nor be ended.
  [[noreturn]] void stop(const char* why) {
    std::string text = std::string("a schedule of threads is stuck: ") + why + "\n";
    for (const Thread& thread : threads_) {
      if (thread.state == State::kEnded) continue;
      const bool waits = thread.state == State::kWaiting;
      text += "  " + thread.purpose + (waits ? " waits\n" : " is ready\n");
    }
    if (when_stuck_) when_stuck_(text);
    std::fprintf(stderr, "%s", text.c_str());
    std::abort();
  }

  static constexpr uint64_t kSlow = 32;
  static constexpr std::chrono::milliseconds kLong{50};

  std::mt19937_64 random_;
  // By one whose turn it is not yet.
  Thread& place_of(uint64_t thread) {
    const std::lock_guard lock(growing_);
    return threads_[thread];
  }

  std::mutex growing_;          // while others look for their own
  std::deque<Thread> threads_;  // stay where they are
  std::vector<size_t> ready_;
  std::set<uint32_t> frozen_;  // processes
  std::function<void(const std::string&)> when_stuck_;
  size_t running_ = 0;
  Time now_{kStart};
  Time slept_until_{};
  uint64_t digest_ = 0;
  uint64_t decisions_ = 0;
};

}  // namespace cpudist::testing
