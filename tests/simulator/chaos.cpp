// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "simulator/chaos.h"

#include <algorithm>
#include <cerrno>

#include "base/wait.h"
#include "simulator/trainer.h"
#include "simulator/world.h"

namespace cpudist::simulator {
namespace {

using std::chrono::milliseconds;

bool lasts(const Fault& fault) { return fault.for_ms > 0 && fault.kind != FaultKind::kJump; }

}  // namespace

Chaos::Chaos(World& world) : world_(world) {
  for (const Fault& fault : world.plan.faults) {
    actions_.push_back({fault.at_ms, &fault, false});
    if (lasts(fault)) actions_.push_back({fault.at_ms + fault.for_ms, &fault, true});
  }
  std::stable_sort(actions_.begin(), actions_.end(),
                   [](const Action& a, const Action& b) { return a.at_ms < b.at_ms; });
}

// False where nothing may begin any more: these servers are lost.
bool Chaos::wait_until(TimePoint when) {
  while (Clock::now() < when) {
    if (world_.life_over() || !world_.goes_on()) return false;
    let_pass(std::min<Clock::duration>(when - Clock::now(), milliseconds(5)));
  }
  return !world_.life_over() && world_.goes_on();
}

void Chaos::run() {
  while (world_.started < world_.plan.trainers && world_.goes_on() && !world_.life_over()) {
    let_pass(milliseconds(1));
  }
  if (!began_) began_ = Clock::now();
  std::vector<const Fault*> active;
  std::vector<Action> left;
  for (const Action& action : actions_) {
    const bool before = wait_until(*began_ + milliseconds(action.at_ms));
    const auto found = std::find(active.begin(), active.end(), action.fault);
    if (action.ends) {
      // Who is frozen has to notice that it is lost.
      if (found == active.end()) continue;
      if (Clock::now() < *began_ + milliseconds(action.at_ms)) {
        let_pass(*began_ + milliseconds(action.at_ms) - Clock::now());
      }
      end(*action.fault);
      active.erase(found);
    } else if (before) {
      begin(*action.fault);
      if (lasts(*action.fault)) active.push_back(action.fault);
    } else {
      left.push_back(action);
      if (lasts(*action.fault))
        left.push_back({action.at_ms + action.fault->for_ms, action.fault, true});
    }
  }
  actions_ = left;
  std::stable_sort(actions_.begin(), actions_.end(),
                   [](const Action& a, const Action& b) { return a.at_ms < b.at_ms; });
  if (world_.life_over()) return;
  world_.faults_over = true;
  world_.events.note("no faults are left");
}

void Chaos::kill_trainer(uint32_t rank) {
  Trainer& trainer = *world_.trainers[rank];
  for (uint32_t server = 0; server < world_.plan.servers; ++server) {
    world_.cluster->gate(server).trainer_killed(rank, trainer.incarnation());
  }
  if (trainer.running()) trainer.kill();
}

void Chaos::begin(const Fault& fault) {
  world_.events.note(describe(fault));
  ++world_.counts.faults;
  Cluster& cluster = *world_.cluster;
  const uint32_t incarnation = world_.trainers[fault.rank]->incarnation();
  switch (fault.kind) {
    case FaultKind::kKillTrainer:
      return kill_trainer(fault.rank);
    case FaultKind::kLoseHost:
      for (uint32_t server = 0; server < world_.plan.servers; ++server) {
        cluster.gate(server).cut_to_server(fault.rank, incarnation);
        cluster.gate(server).cut_to_trainer(fault.rank, incarnation);
      }
      return kill_trainer(fault.rank);
    case FaultKind::kKillServer:
      cluster.kill(fault.server);
      return world_.end_life("server " + std::to_string(fault.server) + " is killed");
    case FaultKind::kFreezeTrainer:
      world_.schedule.freeze(process_of_trainer(fault.rank));
      for (uint32_t server = 0; server < world_.plan.servers; ++server) {
        cluster.gate(server).freeze_trainer(fault.rank);
      }
      return;
    case FaultKind::kFreezeServer:
      world_.schedule.freeze(process_of_server(fault.server));
      return cluster.gate(fault.server).freeze();
    case FaultKind::kCutToServer:
      return cluster.gate(fault.server).cut_to_server(fault.rank, incarnation);
    case FaultKind::kCutToTrainer:
      return cluster.gate(fault.server).cut_to_trainer(fault.rank, incarnation);
    case FaultKind::kJump:
      world_.schedule.jump(milliseconds(fault.for_ms));
      for (uint32_t server = 0; server < world_.plan.servers; ++server) {
        cluster.gate(server).jumped();
      }
      return;
    case FaultKind::kDisk: {
      testing::MemoryFiles& disk = cluster.disk(fault.server);
      const auto from = static_cast<int64_t>(world_.schedule.below(8));
      return disk.fail_at(disk.calls() + from, EIO, fault.for_ms > 0);
    }
  }
}

void Chaos::check_silence() {
  for (uint32_t server = 0; server < world_.plan.servers; ++server) {
    const Gate& gate = world_.cluster->gate(server);
    const std::string wrong = gate.unnoticed();
    if (!wrong.empty()) world_.fail(wrong);
    for (uint32_t rank = 0; rank < world_.plan.trainers; ++rank) {
      const Trainer& trainer = *world_.trainers[rank];
      if (!trainer.running() || !gate.silent_to(rank, trainer.incarnation())) continue;
      if (trainer.has_failed()) continue;
      world_.fail("trainer " + std::to_string(rank) + " has not counted server " +
                  std::to_string(server) + " as lost, which is silent");
    }
  }
}

void Chaos::end(const Fault& fault) {
  check_silence();
  if (fault.for_ms > kSilenceMs) ++world_.counts.silences;
  world_.events.note("it is over that " + describe(fault));
  Cluster& cluster = *world_.cluster;
  switch (fault.kind) {
    case FaultKind::kLoseHost:
    case FaultKind::kCutToServer:
    case FaultKind::kCutToTrainer:
      for (uint32_t server = 0; server < world_.plan.servers; ++server) {
        cluster.gate(server).heal(fault.rank);
      }
      return;
    case FaultKind::kFreezeTrainer:
      world_.schedule.thaw(process_of_trainer(fault.rank));
      for (uint32_t server = 0; server < world_.plan.servers; ++server) {
        cluster.gate(server).thaw_trainer(fault.rank);
      }
      return;
    case FaultKind::kFreezeServer:
      world_.schedule.thaw(process_of_server(fault.server));
      return cluster.gate(fault.server).thaw();
    case FaultKind::kDisk:
      return cluster.disk(fault.server).fail_at(-1, 0, false);
    case FaultKind::kKillTrainer:
    case FaultKind::kKillServer:
    case FaultKind::kJump:
      return;
  }
}

}  // namespace cpudist::simulator
