// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What one seed is made into: how trainers train, over which network, and which faults there are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/inproc/channel.h"
#include "wire/layout.h"

namespace cpudist::simulator {

enum class Strategy { kSync, kHalfAsync, kAsync, kBounded, kGeo };

// Of the table that all train. Rows of those that are not static come into being with a push.
enum class TableKind {
  kStatic,
  kRemote,  // keys of 63 bits
  kOpen,    // any keys, negative ones too
};

enum class FaultKind {
  kKillTrainer,
  kLoseHost,  // of a trainer: it is killed, and nobody is told
  kKillServer,
  kFreezeTrainer,
  kFreezeServer,
  kCutToServer,   // what a trainer sends to a server does not arrive
  kCutToTrainer,  // what a server sends to a trainer does not arrive
  kJump,          // of all clocks
  kDisk,          // a call of a server's disk fails; with a duration all do until it is over
};

struct Fault {
  uint64_t at_ms = 0;  // since all trainers have started
  FaultKind kind = FaultKind::kKillTrainer;
  uint32_t rank = 0;
  uint32_t server = 0;
  uint64_t for_ms = 0;
};

// Silence of so long is a loss; faults of three fifths of it together are none.
inline constexpr uint64_t kLivenessMs = 400;
inline constexpr uint64_t kGraceMs = 100;
inline constexpr uint64_t kShortMs = kLivenessMs * 3 / 5;
// Whoever is there has counted one as lost that was silent for so long.
inline constexpr uint64_t kSilenceMs = 2 * kLivenessMs;
// Longer than anything that ends by itself: who waits for so long waits for ever.
inline constexpr uint64_t kHangMs = 30000;
inline constexpr uint64_t kMarkersMs = 3000;

struct Plan {
  uint64_t seed = 0;
  Strategy strategy = Strategy::kSync;
  uint32_t trainers = 1;
  uint32_t servers = 1;
  uint64_t steps = 1;  // of each trainer, and two after the last fault
  uint64_t bound = wire::kAnyStaleness;
  uint32_t queue_size = 1;
  uint32_t max_merge = 1;
  std::vector<uint32_t> groups;  // HalfAsync: by trainer
  bool leaves = false;
  bool saves = false;
  bool slow_disk = false;
  bool capped = false;  // servers have no memory for rows that change before they are written
  TableKind table = TableKind::kStatic;
  uint64_t interval = 1;    // Geo: steps between exchanges
  uint64_t memory_cap = 0;  // of a server, beside what it has from the start; 0: none
  transport::FaultPlan network;
  bool keyed = false;         // links prove a key before their first frame
  std::vector<Fault> faults;  // in the order of their times

  bool in_rounds() const { return strategy == Strategy::kSync || strategy == Strategy::kHalfAsync; }
  // A handshake is two more round trips, and all of it again where its last frame is lost.
  uint64_t grace_ms() const { return keyed ? 3 * kGraceMs : kGraceMs; }
  bool is_remote() const { return table != TableKind::kStatic; }
  // Whether somebody may be lost.
  bool may_lose() const;
};

// The same for the same seed.
Plan plan_of(uint64_t seed);
std::string describe(const Plan& plan);
std::string describe(const Fault& fault);

}  // namespace cpudist::simulator
