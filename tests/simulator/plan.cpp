// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "simulator/plan.h"

#include <algorithm>
#include <random>

namespace cpudist::simulator {
namespace {

// Beside a slab of rows: dense gradients of a round of four trainers always fit, the index of all
// rows and what pushes hold beside it only now and then.
constexpr uint64_t kLeastCap = 1500;
constexpr uint64_t kMostCap = 4000;

constexpr uint64_t kLeastMs = 5;  // of a fault that lasts

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  uint64_t below(uint64_t count) { return (random_() >> 11) % count; }
  bool one_in(uint64_t count) { return below(count) == 0; }
  uint64_t between(uint64_t least, uint64_t most) { return least + below(most - least + 1); }

 private:
  std::mt19937_64 random_;
};

// Groups are numbered in the order of their lowest ranks.
std::vector<uint32_t> draw_groups(uint32_t trainers, Draw& draw) {
  std::vector<uint32_t> groups;
  uint32_t count = 0;
  for (uint32_t rank = 0; rank < trainers; ++rank) {
    groups.push_back(static_cast<uint32_t>(draw.below(std::min(count + 1, 3u))));
    count = std::max(count, groups.back() + 1);
  }
  return groups;
}

transport::FaultPlan draw_network(uint64_t seed, Draw& draw) {
  transport::FaultPlan plan;
  if (draw.one_in(2)) plan.drop = 0.02;
  if (draw.one_in(2)) plan.duplicate = 0.05;
  if (draw.one_in(2)) plan.reorder = 0.05;
  if (draw.one_in(3)) plan.cut = 0.003;
  if (draw.one_in(2)) {
    plan.delay = 0.2;
    plan.delay_ms_max = 20;
  }
  // None of all would be links that lose nothing, which no fault can hold up.
  if (!plan.any()) plan.duplicate = 1e-9;
  plan.seed = seed;
  return plan;
}

// `short_ms`: how long faults are in all that lose nobody, as one may begin where another ends.
Fault draw_fault(const Plan& plan, uint64_t* short_ms, Draw& draw) {
  constexpr FaultKind kinds[] = {
      FaultKind::kKillTrainer,   FaultKind::kLoseHost,     FaultKind::kKillServer,
      FaultKind::kFreezeTrainer, FaultKind::kFreezeServer, FaultKind::kCutToServer,
      FaultKind::kCutToTrainer,  FaultKind::kJump,         FaultKind::kDisk};
  Fault fault;
  fault.at_ms = draw.below(150);
  fault.kind = kinds[draw.below(std::size(kinds))];
  fault.rank = static_cast<uint32_t>(draw.below(plan.trainers));
  fault.server = static_cast<uint32_t>(draw.below(plan.servers));
  switch (fault.kind) {
    case FaultKind::kKillTrainer:
    case FaultKind::kKillServer:
      break;
    case FaultKind::kLoseHost:
      fault.for_ms = 2 * kLivenessMs;
      break;
    case FaultKind::kDisk:
      fault.for_ms = draw.one_in(2) ? 0 : draw.between(10, 100);
      break;
    default:
      if (draw.one_in(2) && *short_ms + kLeastMs <= kShortMs) {
        fault.for_ms = draw.between(kLeastMs, kShortMs - *short_ms);
        *short_ms += fault.for_ms;
      } else {
        fault.for_ms = draw.between(3 * kLivenessMs / 2, 3 * kLivenessMs);
      }
  }
  return fault;
}

// Of what was simulated before these, seeds have what they always had: draws of their own.
void draw_tables(Plan* plan) {
  Draw draw(plan->seed * 0xd1342543de82ef95u + 1);
  if (draw.one_in(5)) {
    plan->strategy = Strategy::kGeo;
    plan->groups.clear();
    plan->bound = wire::kAnyStaleness;
    plan->interval = draw.between(1, 3);
  }
  if (draw.one_in(3)) plan->table = draw.one_in(2) ? TableKind::kRemote : TableKind::kOpen;
  if (plan->is_remote() && draw.one_in(2)) plan->memory_cap = draw.between(kLeastCap, kMostCap);
}

bool is_short(const Fault& fault) {
  return fault.kind == FaultKind::kDisk || (fault.for_ms > 0 && fault.for_ms <= kShortMs);
}

const char* name_of(Strategy strategy) {
  switch (strategy) {
    case Strategy::kSync:
      return "Sync";
    case Strategy::kHalfAsync:
      return "HalfAsync";
    case Strategy::kAsync:
      return "Async";
    case Strategy::kBounded:
      return "Async, bounded";
    case Strategy::kGeo:
      return "Geo";
  }
  return "?";
}

}  // namespace

bool Plan::may_lose() const {
  const bool lossy = network.drop > 0 || network.cut > 0;
  return std::any_of(faults.begin(), faults.end(), [lossy](const Fault& fault) {
    return !is_short(fault) || (lossy && fault.kind != FaultKind::kDisk);
  });
}

Plan plan_of(uint64_t seed) {
  Draw draw(seed * 0x9e3779b97f4a7c15u);
  constexpr Strategy strategies[] = {Strategy::kSync,  Strategy::kSync,  Strategy::kHalfAsync,
                                     Strategy::kAsync, Strategy::kAsync, Strategy::kBounded};
  Plan plan;
  plan.seed = seed;
  plan.strategy = strategies[draw.below(std::size(strategies))];
  plan.trainers = static_cast<uint32_t>(draw.between(1, 4));
  plan.servers = static_cast<uint32_t>(draw.between(1, 3));
  plan.steps = draw.between(3, 7);
  plan.leaves = draw.one_in(2);
  plan.saves = draw.below(4) > 0;
  plan.slow_disk = draw.one_in(3);
  plan.queue_size = static_cast<uint32_t>(draw.between(1, 3));
  plan.max_merge = static_cast<uint32_t>(draw.between(1, 3));
  if (plan.strategy == Strategy::kBounded) plan.bound = plan.trainers - 1 + draw.below(3);
  if (plan.strategy == Strategy::kHalfAsync) plan.groups = draw_groups(plan.trainers, draw);
  plan.capped = draw.one_in(4);
  draw_tables(&plan);
  if (draw.one_in(5)) return plan;  // links that lose nothing, and no faults
  plan.network = draw_network(seed, draw);
  plan.keyed = seed % 8 == 5 || seed % 8 == 7;  // no draw: others have what they always had
  const uint64_t count = draw.below(4);
  uint64_t short_ms = 0;
  for (uint64_t i = 0; i < count; ++i) plan.faults.push_back(draw_fault(plan, &short_ms, draw));
  std::stable_sort(plan.faults.begin(), plan.faults.end(),
                   [](const Fault& a, const Fault& b) { return a.at_ms < b.at_ms; });
  return plan;
}

std::string describe(const Fault& fault) {
  const std::string rank = "trainer " + std::to_string(fault.rank);
  const std::string server = "server " + std::to_string(fault.server);
  const std::string time = " for " + std::to_string(fault.for_ms) + " ms";
  switch (fault.kind) {
    case FaultKind::kKillTrainer:
      return rank + " is killed";
    case FaultKind::kLoseHost:
      return "the host of " + rank + " is gone" + time;
    case FaultKind::kKillServer:
      return server + " is killed";
    case FaultKind::kFreezeTrainer:
      return rank + " freezes" + time;
    case FaultKind::kFreezeServer:
      return server + " freezes" + time;
    case FaultKind::kCutToServer:
      return "the way from " + rank + " to " + server + " is cut" + time;
    case FaultKind::kCutToTrainer:
      return "the way from " + server + " to " + rank + " is cut" + time;
    case FaultKind::kJump:
      return "clocks jump by " + std::to_string(fault.for_ms) + " ms";
    case FaultKind::kDisk:
      return "the disk of " + server + " fails" + (fault.for_ms == 0 ? " once" : time);
  }
  return "?";
}

std::string describe(const Plan& plan) {
  std::string text = std::string(name_of(plan.strategy)) + ", " + std::to_string(plan.trainers) +
                     " trainers, " + std::to_string(plan.servers) + " servers, " +
                     std::to_string(plan.steps) + " steps";
  if (plan.bound != wire::kAnyStaleness) text += ", bound " + std::to_string(plan.bound);
  if (!plan.groups.empty()) text += ", groups";
  for (const uint32_t group : plan.groups) text += " " + std::to_string(group);
  if (plan.strategy == Strategy::kGeo) {
    text += ", exchanges every " + std::to_string(plan.interval) + " steps";
  } else {
    text +=
        ", queue " + std::to_string(plan.queue_size) + ", merges " + std::to_string(plan.max_merge);
  }
  if (plan.table == TableKind::kRemote) text += ", a remote table";
  if (plan.table == TableKind::kOpen) text += ", an open table";
  if (plan.memory_cap > 0) text += ", memory for " + std::to_string(plan.memory_cap) + " bytes";
  if (plan.leaves) text += ", leaves";
  if (plan.saves) text += ", saves";
  if (plan.slow_disk) text += ", slow disk";
  if (plan.capped) text += ", no memory for cuts";
  const transport::FaultPlan& network = plan.network;
  text += network.any() ? ", links: drop " + std::to_string(network.drop) + " duplicate " +
                              std::to_string(network.duplicate) + " reorder " +
                              std::to_string(network.reorder) + " delay " +
                              std::to_string(network.delay) + " cut " + std::to_string(network.cut)
                        : ", links that lose nothing";
  if (plan.keyed) text += ", with a key";
  for (const Fault& fault : plan.faults) {
    text += "; at " + std::to_string(fault.at_ms) + " ms " + describe(fault);
  }
  return text;
}

}  // namespace cpudist::simulator
