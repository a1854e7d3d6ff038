// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a process that was stopped itself counts as the others' silence, and as a wait for them.

#include "transport/liveness.h"

#include "support/check.h"

using namespace cpudist;  // NOLINT
using transport::Attendance;

namespace {

using std::chrono::milliseconds;

constexpr uint64_t kLivenessMs = 1000;  // a look every 50 ms, a heartbeat every 200

TEST(attendance_of_who_looks_in_time_has_missed_nothing) {
  Attendance attendance(kLivenessMs);
  TimePoint now = Clock::now();
  attendance.stay(now);
  for (int look = 0; look < 10; ++look) {
    now += milliseconds(50);
    CHECK(!attendance.was_away(now));
    CHECK(attendance.missed() == Clock::duration::zero());
  }
}

TEST(attendance_misses_what_is_beyond_a_look_though_it_hides_no_silence) {
  Attendance attendance(kLivenessMs);
  const TimePoint begun = Clock::now();
  attendance.stay(begun);
  CHECK(!attendance.was_away(begun + milliseconds(600)));
  CHECK(attendance.missed() == milliseconds(550));
  CHECK(attendance.was_away(begun + milliseconds(600 + 601)));
  CHECK(attendance.missed() == milliseconds(551));
  CHECK(!attendance.was_away(begun + milliseconds(600 + 601 + 1)));
  CHECK(attendance.missed() == Clock::duration::zero());
}

TEST(attendance_of_who_was_at_work_has_missed_nothing) {
  Attendance attendance(kLivenessMs);
  const TimePoint begun = Clock::now();
  attendance.stay(begun + milliseconds(5000));
  CHECK(!attendance.was_away(begun + milliseconds(5010)));
  CHECK(attendance.missed() == Clock::duration::zero());
}

}  // namespace
