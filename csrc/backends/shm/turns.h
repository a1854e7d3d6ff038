// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Waiting for something that whoever waits goes on with: one of them at a time, in turns.
#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>

#include "base/wait.h"

namespace cpudist::shm {

// How long one turn of going on lasts, so that others may look up.
constexpr std::chrono::milliseconds kTurn{500};

// Until `done()`, at most `limit` (empty: without end); returns whether it is. Each turn is a
// `step(until)`, or, while `left()` to others, a wait for `ended`. Called and left with the lock
// held, which step() may let go.
template <typename Done, typename Left, typename Step>
bool drive_until(std::unique_lock<std::mutex>& lock, ConditionVariable& ended,
                 std::optional<std::chrono::milliseconds> limit, const Done& done, const Left& left,
                 const Step& step) {
  const Clock::time_point until =
      limit ? Clock::now() + *limit : Clock::time_point::max() - std::chrono::hours(1);
  while (!done()) {
    const Clock::time_point now = Clock::now();
    if (now >= until) return false;
    const Clock::time_point turn = std::min(until, now + kTurn);
    if (left()) {
      ended.wait_until(lock, turn);
    } else {
      step(turn);
    }
  }
  return true;
}

}  // namespace cpudist::shm
