// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The clock that deadlines are measured with, and the only place that reads it: a schedule that
// has another time (base/schedule.h) has it in every wait of the library.
#pragma once

#include <chrono>

#include "base/schedule.h"

namespace cpudist {

struct Clock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::steady_clock::time_point;
  static constexpr bool is_steady = true;

  static time_point now() noexcept {
    Schedule* const schedule = thread_schedule;
    return schedule == nullptr ? std::chrono::steady_clock::now() : schedule->now();
  }
};

using TimePoint = Clock::time_point;

}  // namespace cpudist
