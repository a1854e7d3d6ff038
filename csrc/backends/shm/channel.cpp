// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Events, waiting for them, and telling all ranks when that has no end.
#include "backends/shm/channel.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "backends/shm/futex.h"

namespace cpudist::shm {

namespace {

// A sleep looks up after so long: for processes that have ended.
constexpr std::chrono::milliseconds kSlice{200};
constexpr uint32_t kText = 2;  // of Control::broken: the reason can be read

bool reached(uint32_t posted, uint32_t event) {
  return static_cast<int32_t>(posted - event) >= 0;  // counters wrap
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  sched_yield();
#endif
}

void tell_processors(Control& control) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return;
  for (size_t cpu = 0; cpu < std::min<size_t>(CPU_SETSIZE, kCpuWords * 64); ++cpu) {
    if (CPU_ISSET(cpu, &set)) control.cpus[cpu / 64].fetch_or(uint64_t{1} << (cpu % 64));
  }
}

int told_processors(const Control& control) {
  int count = 0;
  for (const auto& word : control.cpus) count += std::popcount(word.load());
  return count;
}

Error as_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& one) {
    return one;
  } catch (const std::exception& other) {
    return {ErrorCode::kInternal, std::string("backend shm: ") + other.what()};
  }
}

}  // namespace

Channel::Channel(Segment segment, int rank, std::vector<int> names,
                 std::chrono::milliseconds timeout)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(static_cast<int>(names.size())),
      names_(std::move(names)),
      liveness_() {
  join(timeout);
}

void Channel::join(std::chrono::milliseconds timeout) {
  tell_processors(segment_.control());
  segment_.line(rank_).pid.store(::getpid());
  post();
  const Clock::time_point until = Clock::now() + timeout;
  // Nobody is watched yet: who ends before all have come is told as late.
  for (int rank = 0; rank < size_; ++rank) {
    while (!met({event_, rank})) {
      RankLine& line = segment_.line(rank);
      if (Clock::now() >= until) {
        throw Error(ErrorCode::kTimeout,
                    "backend shm: " + name(rank) + " did not open the shared memory within " +
                        std::to_string(timeout.count()) + " ms; see what it says");
      }
      line.waiters.fetch_add(1);
      const uint32_t seen = line.posted.load();
      if (!reached(seen, event_)) futex_wait(line.posted, seen, kSlice);
      line.waiters.fetch_sub(1);
    }
  }
  std::vector<int> pids;
  for (int rank = 0; rank < size_; ++rank) pids.push_back(segment_.line(rank).pid.load());
  liveness_.watch(pids);
  if (rank_ == 0) segment_.seal();  // all have opened it
  const int processors = told_processors(segment_.control());
  crowded_ = processors > 0 && size_ > processors;
}

Channel::~Channel() {
  if (liveness_.pid(rank_) != ::getpid()) return;  // a forked child: the parent is still here
  stop();
}

Condition Channel::flip() {
  buffer_ ^= 1;
  return {last_[buffer_] + 1, kAllRanks};
}

void Channel::post() {
  RankLine& line = segment_.line(rank_);
  last_[buffer_] = ++event_;
  line.posted.store(event_);  // sequentially consistent, as the sleeper's two steps are
  if (line.waiters.load() != 0) futex_wake(line.posted);
}

void Channel::post(const Header& header) {
  segment_.line(rank_).headers[calls_ % 2] = header;
  post();
}

void Channel::check_headers() const {
  const Header& own = header(rank_);
  for (int rank = 0; rank < size_; ++rank) {
    const Header& other = header(rank);
    if (own.agrees(other)) continue;
    const int first = std::min(rank, rank_), second = std::max(rank, rank_);
    throw Error(ErrorCode::kConfigMismatch,
                "backend shm: ranks call different collectives: " + name(first) + " calls " +
                    header(first).describe() + ", " + name(second) + " calls " +
                    header(second).describe() +
                    ". Make the calls equal, and in the same order, on all ranks.");
  }
}

int Channel::missing(const Condition& condition) const {
  if (condition.from == kNoRank) return kNoRank;
  if (condition.from != kAllRanks) {
    const auto& posted = segment_.line(condition.from).posted;
    return reached(posted.load(std::memory_order_acquire), condition.event) ? kNoRank
                                                                            : condition.from;
  }
  for (int rank = 0; rank < size_; ++rank) {
    const auto& posted = segment_.line(rank).posted;
    if (!reached(posted.load(std::memory_order_acquire), condition.event)) return rank;
  }
  return kNoRank;
}

bool Channel::spin(const Condition& condition, const Patience& patience) const {
  for (int i = 0; i < patience.pauses; ++i) {
    if (met(condition)) return true;
    pause();
  }
  const Clock::time_point end = Clock::now() + patience.yields;
  do {
    if (met(condition)) return true;
    sched_yield();
  } while (Clock::now() < end);
  return met(condition);
}

bool Channel::wait(const Condition& condition, const Patience& patience, Clock::time_point until) {
  if (spin(condition, patience)) return true;
  while (true) {
    const int rank = missing(condition);
    if (rank == kNoRank) return true;
    throw_if_broken();
    check_missing(condition);
    const Clock::time_point now = Clock::now();
    if (now >= until || stopping()) return false;
    RankLine& line = segment_.line(rank);
    line.waiters.fetch_add(1);
    const uint32_t seen = line.posted.load();
    if (!reached(seen, condition.event) && !stopping()) {
      futex_wait(line.posted, seen, std::min<Clock::duration>(kSlice, until - now));
    }
    line.waiters.fetch_sub(1);
  }
}

// Throws if one that is waited for has ended: also one behind another that is only late.
void Channel::check_missing(const Condition& condition) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (condition.from != kAllRanks && condition.from != rank) continue;
    if (met({condition.event, rank})) continue;
    try {
      check_there(rank);
    } catch (const Error&) {
      if (!met({condition.event, rank})) throw;  // its last event came just before its end
    }
  }
}

void Channel::wait_bell(uint32_t seen, const Patience& patience, Clock::time_point until) {
  for (int i = 0; i < patience.pauses; ++i) {
    if (bell() != seen) return;
    pause();
  }
  const Clock::time_point end = Clock::now() + patience.yields;
  do {
    if (bell() != seen) return;
    sched_yield();
  } while (Clock::now() < end);
  RankLine& line = segment_.line(rank_);
  line.door_waiters.fetch_add(1);
  const Clock::time_point now = Clock::now();
  if (line.doorbell.load() == seen && now < until && !stopping()) {
    futex_wait(line.doorbell, seen, std::min<Clock::duration>(kSlice, until - now));
  }
  line.door_waiters.fetch_sub(1);
}

void Channel::ring(int rank) {
  RankLine& line = segment_.line(rank);
  line.doorbell.fetch_add(1);
  if (line.door_waiters.load() != 0) futex_wake(line.doorbell);
}

Patience Channel::caller_patience() const {
  if (crowded_) return {0, std::chrono::microseconds(50)};
  return {256, std::chrono::microseconds(100)};
}

Patience Channel::engine_patience() const { return {0, std::chrono::microseconds(20)}; }

void Channel::check_there(int rank) const {
  const bool left = segment_.line(rank).left.load() != 0;
  if (!left && !liveness_.ended(rank)) return;
  throw Error(ErrorCode::kPeerLost, "backend shm: " + name(rank) + " (process " +
                                        std::to_string(pid(rank)) + ") has " +
                                        (left ? "left the group" : "ended") +
                                        " while others wait for it. Restart the run.");
}

Error Channel::late(const Condition& condition, const std::string& what,
                    std::chrono::milliseconds timeout) const {
  const int rank = missing(condition);
  return late_rank(rank == kNoRank ? rank_ : rank, what, timeout);
}

Error Channel::late_rank(int rank, const std::string& what,
                         std::chrono::milliseconds timeout) const {
  const bool stopped = liveness_.stopped(rank);
  return Error(
      stopped ? ErrorCode::kPeerLost : ErrorCode::kTimeout,
      "backend shm: " + name(rank) + " (process " + std::to_string(pid(rank)) + ", " +
          (stopped ? "stopped by a signal" : "alive") + ") did not come to " + what + " within " +
          std::to_string(timeout.count()) +
          " ms. Let all ranks make the same calls; a longer pause needs a larger timeout of the "
          "group.");
}

void Channel::throw_if_broken() const {
  const Control& control = segment_.control();
  if (control.broken.load(std::memory_order_acquire) != kText) return;
  throw Error(static_cast<ErrorCode>(control.code), control.text.data());
}

void Channel::break_group(const std::exception_ptr& cause) {
  const Error error = as_error(cause);
  Control& control = segment_.control();
  uint32_t whole = 0;
  if (!control.broken.compare_exchange_strong(whole, 1)) return;
  control.code = static_cast<uint32_t>(error.code());
  std::strncpy(control.text.data(), error.what(), kTextBytes - 1);
  control.broken.store(kText);
  wake_all();
}

void Channel::stop() {
  stopping_.store(true);
  segment_.line(rank_).left.store(1);
  wake_all();
}

void Channel::wake_all() {
  for (int rank = 0; rank < size_; ++rank) {
    RankLine& line = segment_.line(rank);
    futex_wake(line.posted);
    line.doorbell.fetch_add(1);
    futex_wake(line.doorbell);
  }
}

}  // namespace cpudist::shm
