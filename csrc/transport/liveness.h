// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// When somebody who says nothing counts as lost: how often to say that one is
// there, how often to look who is, and what is no silence.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "base/clock.h"
#include "transport/channel.h"

namespace cpudist::transport {

inline constexpr uint64_t kBeatsPerLiveness = 5;
// Bytes count as heard when they are noticed: the time between two looks is
// added to a silence.
inline constexpr uint64_t kLooksPerLiveness = 20;

// A process closes its sockets a little before it has ended.
inline constexpr auto kEndLook = std::chrono::milliseconds(5);

inline std::chrono::milliseconds beat_interval(uint64_t liveness_ms) {
  return std::chrono::milliseconds(std::max<uint64_t>(liveness_ms / kBeatsPerLiveness, 1));
}

inline std::chrono::milliseconds look_interval(uint64_t liveness_ms) {
  return std::chrono::milliseconds(std::max<uint64_t>(liveness_ms / kLooksPerLiveness, 1));
}

// A process that was stopped itself has heard nobody; that is not the others'
// silence.
class Attendance {
 public:
  explicit Attendance(uint64_t liveness_ms)
      : most_(3 * beat_interval(liveness_ms)),
        look_(look_interval(liveness_ms)),
        last_(Clock::now()) {}
  // To be asked at every look.
  bool was_away(TimePoint now) {
    const Clock::duration since = now - last_;
    last_ = now;
    missed_ = std::max(since - look_, Clock::duration::zero());
    return since > most_;
  }
  // For how long the last look that was asked about had been due. In that time nobody could be
  // reached, and it is no part of a wait for somebody to come back.
  Clock::duration missed() const { return missed_; }
  // What took its time since the last look was no absence.
  void stay(TimePoint now) { last_ = now; }

 private:
  Clock::duration most_;
  Clock::duration look_;
  TimePoint last_;
  Clock::duration missed_{};
};

// Whether bytes have moved on a connection since the last look, which is a sign
// of life.
inline bool has_moved(const Connection& connection, uint64_t& seen_bytes) {
  const uint64_t before = seen_bytes;
  seen_bytes = connection.bytes_moved();
  return seen_bytes != before;
}

}  // namespace cpudist::transport
