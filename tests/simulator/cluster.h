// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The servers of one life: from their start to when they are stopped or one of them is killed. Each
// has a disk of its own, which outlives it, but for what was not synced.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/options.h"
#include "simulator/event_log.h"
#include "simulator/gate.h"
#include "simulator/model.h"
#include "simulator/outcome.h"
#include "simulator/plan.h"
#include "support/memory_files.h"
#include "support/seeded_schedule.h"
#include "transport/inproc/channel.h"

namespace cpudist::simulator {

// Of a schedule's processes: the test, trainers, servers.
inline uint32_t process_of_trainer(uint32_t rank) { return 1 + rank; }
inline uint32_t process_of_server(uint32_t server) { return 100 + server; }

// What is on a disk, by path.
using Disk = std::map<std::string, testing::MemoryFiles::Bytes>;

// Thread safety: none of its own; it is for threads that run one at a time.
class Cluster {
 public:
  // `model` is told what trainers that step by themselves hand on. `disks`: what there is, by
  // server. All but these outlive it.
  Cluster(const Plan& plan, const wire::ParamSetLayout& layout, Model& model, size_t life,
          const std::vector<Disk>& disks, testing::SeededSchedule& schedule, EventLog& events);
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  client::ClientOptions client_options(uint32_t rank, uint32_t incarnation) const;
  std::shared_ptr<transport::Connector> connector(transport::ConnectionHandler* handler,
                                                  uint32_t rank, uint32_t incarnation);
  Gate& gate(uint32_t server) { return *hosts_[server].gate; }
  testing::MemoryFiles& disk(uint32_t server) { return *hosts_[server].disk; }
  std::vector<uint32_t> owners() const;  // of rows of the table
  // Of servers that keep more than they may; empty: none.
  std::string over_cap() const;
  void kill(uint32_t server);
  // What is on the disks when all have lost their power.
  std::vector<Disk> lose_power();
  uint64_t stale() const;
  void add_to(Counts* counts) const;

 private:
  struct Host {
    std::shared_ptr<testing::MemoryFiles> disk;
    std::unique_ptr<Gate> gate;
    std::unique_ptr<transport::Listener> listener;
    std::optional<Disk> left;  // on the disk, when it was killed
  };

  void start(uint32_t server, const Disk& disk, size_t life);
  // Null where links have no key.
  std::shared_ptr<const wire::Credentials> credentials(wire::Role role, uint32_t rank,
                                                       uint32_t incarnation) const;
  Disk after_crash(const Host& host);

  const Plan& plan_;
  const wire::ParamSetLayout& layout_;
  Model& model_;
  testing::SeededSchedule& schedule_;
  EventLog& events_;
  const uint64_t run_id_;
  std::shared_ptr<transport::InprocNetwork> network_;
  std::vector<Host> hosts_;
};

}  // namespace cpudist::simulator
