// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Makes the faults of a plan happen, each at its time, and ends them.
#pragma once

#include <optional>
#include <vector>

#include "base/clock.h"
#include "simulator/plan.h"

namespace cpudist::simulator {

class World;

// Thread safety: none of its own; it is for threads that run one at a time.
class Chaos {
 public:
  explicit Chaos(World& world);

  // The body of a thread, while these servers live: all of it, or what is left when they are lost.
  void run();

 private:
  struct Action {
    uint64_t at_ms = 0;
    const Fault* fault = nullptr;
    bool ends = false;
  };

  bool wait_until(TimePoint when);
  void begin(const Fault& fault);
  void end(const Fault& fault);
  void kill_trainer(uint32_t rank);
  // Whoever is silent for long is lost to those that are there.
  void check_silence();

  World& world_;
  std::optional<TimePoint> began_;
  std::vector<Action> actions_;  // in the order of their times
};

}  // namespace cpudist::simulator
