// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What collectives are made of: events that every rank of a group comes to in the same order, and
// two buffers of each rank that the others read.
//
// A rank posts event e when its bytes of e are in its current buffer and it has read all it wants
// of earlier events. So a buffer whose bytes were last read at event e may be written again when
// all ranks have posted e + 1.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "backends/shm/liveness.h"
#include "backends/shm/segment.h"
#include "base/clock.h"
#include "base/errors.h"

namespace cpudist::shm {

constexpr int kAllRanks = -1;
constexpr int kNoRank = -2;

// Something to wait for: that one rank, or all, have posted an event.
struct Condition {
  uint32_t event = 0;
  int from = kNoRank;
};

// How a wait uses its core before it sleeps.
struct Patience {
  int pauses = 0;
  std::chrono::microseconds yields{0};
};

class Channel {
 public:
  // `rank` of the segment's ranks; `names`, what they are called in messages. Waits for all.
  // Throws Error if one does not come within `timeout`.
  Channel(Segment segment, int rank, std::vector<int> names, std::chrono::milliseconds timeout);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t slot_bytes() const { return segment_.layout().slot_bytes; }
  const Segment& segment() const { return segment_; }
  int pid(int rank) const { return liveness_.pid(rank); }
  std::string name(int rank) const { return "rank " + std::to_string(names_[size_t(rank)]); }

  // -- events; by one thread at a time

  void begin_call() { ++calls_; }
  // Goes to the other buffer; the result holds when it may be written.
  Condition flip();
  std::byte* slot(int rank) const { return segment_.slot(rank, buffer_); }
  void post();
  void post(const Header& header);
  Condition all() const { return {event_, kAllRanks}; }
  Condition from(int rank) const { return {event_, rank}; }
  const Header& header(int rank) const { return segment_.line(rank).headers[calls_ % 2]; }
  // Throws Error(kConfigMismatch), on every rank, unless all headers agree.
  void check_headers() const;

  // -- waiting

  bool met(const Condition& condition) const { return missing(condition) == kNoRank; }
  // Returns whether the condition holds; false at `until`, or after stop(). Throws Error if
  // it never will: a process has ended or has left, or the group is broken.
  bool wait(const Condition& condition, const Patience& patience, Clock::time_point until);
  // Sleeps until something rings this rank's bell again, or `until`.
  void wait_bell(uint32_t seen, const Patience& patience, Clock::time_point until);
  // Throws Error if the process has ended or has left.
  void check_there(int rank) const;
  uint32_t bell() const { return segment_.line(rank_).doorbell.load(std::memory_order_acquire); }
  // Every rank that sleeps looks up.
  void wake_all();
  void ring(int rank);
  Patience caller_patience() const;
  Patience engine_patience() const;

  // -- the end

  // What a wait that took `timeout` is told: who is missing and what it does.
  Error late(const Condition& condition, const std::string& what,
             std::chrono::milliseconds timeout) const;
  Error late_rank(int rank, const std::string& what, std::chrono::milliseconds timeout) const;
  void throw_if_broken() const;
  // All ranks' waits end with this error, unless they have ended with another.
  void break_group(const std::exception_ptr& error);
  void stop();  // waits of this rank return, the others' know that it has left
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }

 private:
  int missing(const Condition& condition) const;
  void check_missing(const Condition& condition) const;
  bool spin(const Condition& condition, const Patience& patience) const;
  void join(std::chrono::milliseconds timeout);

  Segment segment_;
  const int rank_;
  const int size_;
  const std::vector<int> names_;
  Liveness liveness_;
  bool crowded_ = false;  // more ranks than processors
  uint32_t event_ = 0;
  uint32_t calls_ = 0;
  unsigned buffer_ = 0;
  uint32_t last_[2] = {0, 0};  // event at which each buffer was last read
  std::atomic<bool> stopping_{false};
};

}  // namespace cpudist::shm
