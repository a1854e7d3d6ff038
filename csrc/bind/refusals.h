// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a listener has refused, for Python's log.
#pragma once

#include <algorithm>
#include <chrono>

#include "bind/bind.h"
#include "transport/door.h"

namespace cpudist::bind {

// ((address, why) of the newest ones since the last call, how many there were). Waits for one, at
// most so long, until the door is closed; releases the GIL meanwhile.
inline py::tuple told_refusals(transport::Door& door, double timeout_s) {
  const std::chrono::duration<double> timeout(std::clamp(timeout_s, 0.0, 3600.0));
  transport::Door::Refusals found;
  {
    const GilReleased no_gil;
    found = door.take_refusals(Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout));
  }
  py::list told;
  for (const auto& [address, reason] : found.newest) told.append(py::make_tuple(address, reason));
  return py::make_tuple(told, found.count);
}

}  // namespace cpudist::bind
