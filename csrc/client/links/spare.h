// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// When another connection is made to a server whose own is silent. A silent TCP connection may only
// be waiting for its next retransmission, which comes seconds after the network is back.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>

#include "base/clock.h"
#include "transport/liveness.h"

namespace cpudist::client {

struct Spare {
  std::shared_ptr<transport::Connection> connection;  // its hello is not answered yet
  bool sought = false;                                // a thread makes some
  TimePoint next;                                     // such thread, at the earliest
  TimePoint tried;                                    // when the last attempt began
  TimePoint switched;                                 // when one took the place of a silent one
  Clock::duration reach_took{};                       // the last connection, to be made

  // From a third of the liveness on. From two where it has helped lately: a server that is too busy
  // to read is not to be sent the same again and again.
  bool wanted(const std::string& address, TimePoint now, TimePoint heard,
              uint64_t liveness_ms) const {
    const std::chrono::milliseconds liveness(liveness_ms);
    const bool lately = now - switched < 10 * liveness;
    return address.starts_with("tcp:") && now - heard >= liveness * (lately ? 2 : 1) / 3;
  }
  // An attempt ends early: what it has sent first may be lost, too, and another goes out at once.
  TimePoint deadline(TimePoint heard, uint64_t liveness_ms) const {
    const Clock::duration most = transport::beat_interval(liveness_ms);
    const Clock::duration some = 4 * reach_took + transport::look_interval(liveness_ms);
    return std::min(Clock::now() + std::min(some, most),
                    heard + std::chrono::milliseconds(liveness_ms));
  }
};

}  // namespace cpudist::client
