// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "simulator/world.h"

#include <thread>

#include "base/threads.h"
#include "base/wait.h"
#include "simulator/chaos.h"
#include "simulator/trainer.h"

namespace cpudist::simulator {

World::World(const Plan& given, bool aloud)
    : plan(given),
      schedule(plan.seed),
      events(schedule, aloud),
      model(plan),
      saves(plan, model, layout, events),
      disks(plan.servers) {
  describe();
  for (uint32_t rank = 0; rank < plan.trainers; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(*this, rank));
  }
}

World::~World() {
  for (const auto& trainer : trainers) trainer->stop();
  cluster.reset();
}

// A row for each step of each trainer, and some for all; on each server an element for each process
// of a trainer.
void World::describe() {
  kernels::OptimizerConfig sgd;
  sgd.lr = 1.0;
  layout.mode = plan.in_rounds() ? wire::UpdateMode::kRounds : wire::UpdateMode::kOnArrival;
  layout.max_staleness = plan.bound;
  layout.trainer_groups = plan.groups;
  layout.configs = {sgd};
  layout.exchanges_deltas = plan.strategy == Strategy::kGeo;
  layout.tables = {model.table()};
  for (uint32_t server = 0; server < plan.servers; ++server) {
    layout.blocks.push_back({.name = "d" + std::to_string(server),
                             .elements = model.element_count(),
                             .shard = server,
                             .parameter = server});
  }
}

void World::fail(const std::string& what) {
  events.note("wrong: " + what);
  if (wrong_.empty()) wrong_ = what;
}

void World::end_life(const std::string& why) {
  if (life_over_) return;
  events.note("all begin anew: " + why);
  life_over_ = true;
}

template <typename Body>
void World::guarded(const Body& body) {
  if (!goes_on()) return;
  try {
    body();
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

Outcome World::run() {
  counts.seeds = 1;
  events.note(simulator::describe(plan));
  Chaos chaos(*this);
  while (goes_on()) {
    guarded([&] { live(chaos); });
    if (!goes_on() || !life_over_) break;
    guarded([&] { begin_anew(); });
  }
  guarded([&] { check_end(); });
  for (const auto& trainer : trainers) {
    guarded([&] { trainer->say_goodbye(); });
    trainer->stop();
  }
  if (cluster) cluster->add_to(&counts);
  counts.committed = saves.committed();
  counts.simulated_ms = static_cast<uint64_t>(schedule.passed().count());
  return {wrong_, events.digest(), schedule.decisions(), counts};
}

// Until trainers have made their steps, or servers are lost.
void World::live(Chaos& chaos) {
  life_over_ = false;
  started = 0;
  from_snapshot = saves.newest().has_value();
  cluster = std::make_unique<Cluster>(plan, layout, model, life_, disks, schedule, events);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < plan.trainers; ++rank) {
    const testing::SeededSchedule::Starting starting(schedule, process_of_trainer(rank));
    Trainer& trainer = *trainers[rank];
    trainer.begin_life();
    threads.push_back(
        start_thread("trainer " + std::to_string(rank), [&trainer] { trainer.live(); }));
  }
  threads.push_back(start_thread("faults", [&] { guarded([&] { chaos.run(); }); }));
  for (std::thread& thread : threads) join_thread(thread);
  if (cluster->stale() > 0) fail("a gradient is older than the bound");
  std::string wrong = model.check_rounds(cluster->owners());
  if (wrong.empty()) wrong = cluster->over_cap();
  if (!wrong.empty()) fail(wrong);
}

void World::begin_anew() {
  for (const auto& trainer : trainers) trainer->stop();
  disks = cluster->lose_power();
  model.roll_back(saves.newest() ? &saves.newest()->values : nullptr, cluster->owners());
  cluster->add_to(&counts);
  cluster.reset();
  ++life_;
  ++counts.lives;
}

// All that is to be there, and nothing else.
void World::check_end() {
  std::vector<Values> own;
  for (size_t rank = 0; plan.strategy == Strategy::kGeo && rank < trainers.size(); ++rank) {
    own.push_back(trainers[rank]->take_in());
  }
  const Values values = trainers[0]->read();
  std::string wrong = model.check_end(values, cluster->owners());
  for (size_t rank = 0; rank < own.size() && wrong.empty(); ++rank) {
    wrong = model.check_own(static_cast<uint32_t>(rank), own[rank], values);
  }
  if (wrong.empty()) wrong = cluster->over_cap();
  if (!wrong.empty()) fail("at the end: " + wrong);
}

}  // namespace cpudist::simulator
