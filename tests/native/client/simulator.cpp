// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The simulator of tests/simulator: the first seeds have nothing wrong, what is to happen in them
// happens, and each runs again as it ran. scripts/simulate.sh runs more of them, and has it find
// planted mistakes.

#include "simulator/world.h"
#include "support/check.h"

namespace cpudist::testing {
namespace {

using simulator::Counts;
using simulator::Outcome;

Outcome simulate(uint64_t seed) { return simulator::World(simulator::plan_of(seed), false).run(); }

}  // namespace

TEST(simulator_finds_nothing_wrong_in_what_happens) {
  Counts all;
  for (uint64_t seed = 1; seed <= (kInstrumented ? 20 : 100); ++seed) {
    const Outcome outcome = simulate(seed);
    if (!outcome.wrong.empty()) {
      fail(__FILE__, __LINE__,
           "seed " + std::to_string(seed) + ": " + outcome.wrong +
               " (bash scripts/simulate.sh --seed " + std::to_string(seed) + ")");
    }
    all.add(outcome.counts);
  }
  CHECK(all.steps > 0 && all.faults > 0 && all.frames > 0 && all.leaves > 0);
  if (kInstrumented) return;  // too few seeds to have seen all that there is
  CHECK(all.resent > 0 && all.unwritten > 0);
  CHECK(all.cuts > all.committed && all.committed > 0);
  CHECK(all.processes > 0 && all.lives > all.restored && all.restored > 0);
  CHECK(all.exchanges > 0 && all.refused > 0 && all.early_bytes > 0);
  CHECK(all.silences > 0 && all.fenced > 0);
}

TEST(simulator_runs_a_seed_again_as_it_ran) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    const Outcome first = simulate(seed);
    const Outcome again = simulate(seed);
    CHECK_EQ(again.digest, first.digest);
    CHECK_EQ(again.decisions, first.decisions);
  }
}

}  // namespace cpudist::testing
