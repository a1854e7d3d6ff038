// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One simulation, of one seed: servers live until they are lost, trainers restart as they would be
// restarted, faults happen, and what comes of it is compared with the plain model.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "simulator/cluster.h"
#include "simulator/event_log.h"
#include "simulator/model.h"
#include "simulator/outcome.h"
#include "simulator/plan.h"
#include "simulator/saves.h"
#include "support/seeded_schedule.h"

namespace cpudist::simulator {

class Chaos;
class Trainer;

// Thread safety: none of its own; it is for threads that run one at a time.
class World {
 public:
  // `aloud`: every event is printed.
  World(const Plan& plan, bool aloud);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  Outcome run();

  // ---- what trainers and faults share ----
  const Plan plan;
  testing::SeededSchedule schedule;
  EventLog events;
  wire::ParamSetLayout layout;
  Model model;
  Saves saves;
  Counts counts;
  std::vector<Disk> disks;           // of servers, before they started last
  std::unique_ptr<Cluster> cluster;  // that lives
  std::vector<std::unique_ptr<Trainer>> trainers;
  uint32_t started = 0;  // trainers, with these servers
  bool faults_over = false;
  bool full = false;           // a server has refused rows: no step makes more of them
  bool from_snapshot = false;  // these servers are to have the newest one's values

  void fail(const std::string& what);
  bool goes_on() const { return wrong_.empty(); }
  // Servers are lost to all, who have to begin anew.
  void end_life(const std::string& why);
  bool life_over() const { return life_over_; }

 private:
  void describe();
  void live(Chaos& chaos);
  void begin_anew();
  void check_end();
  template <typename Body>
  void guarded(const Body& body);

  std::string wrong_;
  bool life_over_ = false;
  size_t life_ = 0;
};

}  // namespace cpudist::simulator
