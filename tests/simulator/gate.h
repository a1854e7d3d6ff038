// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Between the network and one server: what comes from a trainer, or goes to it, is dropped while
// the way is cut, kept while whoever should read it is frozen, and for nobody once one of both has
// been killed. A server and its trainers see links that break as those of a real network do.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/clock.h"
#include "server/server.h"
#include "simulator/event_log.h"
#include "simulator/staleness_watch.h"
#include "support/seeded_schedule.h"

#include "transport/channel.h"
#include "wire/push.h"

namespace cpudist::simulator {

// Thread safety: none of its own; it is for threads that run one at a time.
class Gate final : public transport::ConnectionHandler {
 public:
  using Link = std::shared_ptr<transport::Connection>;
  // What a push has that the server reads for the first time, and which process sent it.
  using Pushed =
      std::function<void(uint32_t rank, uint32_t incarnation, const wire::PushView& push)>;

  // All but the options outlive it. `pushed` may be null.
  Gate(const server::ServerOptions& options, const wire::ParamSetLayout& layout, uint64_t bound,
       Pushed pushed, testing::SeededSchedule& schedule, EventLog& events);
  ~Gate() override;

  server::Server& server() { return server_; }
  uint64_t memory_cap() const { return memory_cap_; }
  uint64_t stale() const { return stale_; }  // gradients that were older than the bound

  // ---- faults ----
  void kill() { dead_ = true; }
  void freeze() { frozen_ = true; }
  void thaw();
  void freeze_trainer(uint32_t rank) { frozen_trainers_.insert(rank); }
  void thaw_trainer(uint32_t rank);
  // Of this process of a trainer, and those before it.
  void cut_to_server(uint32_t rank, uint32_t incarnation) { cut_in_[rank] = incarnation; }
  void cut_to_trainer(uint32_t rank, uint32_t incarnation) { cut_out_[rank] = incarnation; }
  void heal(uint32_t rank);
  // The process has been killed: what it says of its end was never said.
  void trainer_killed(uint32_t rank, uint32_t incarnation) { killed_[rank] = incarnation; }

  // ---- silence ----
  // A trainer that this server has not counted as lost, though it has heard nothing of it for more
  // than kSilenceMs; empty: none.
  std::string unnoticed() const;
  // And whether this process of a trainer has heard nothing of the server for so long.
  bool silent_to(uint32_t rank, uint32_t incarnation) const;
  // Clocks have jumped: nobody knows who was silent.
  void jumped() { forget_silence(nullptr); }

  // ---- the network ----
  void on_open(const Link& connection) override;
  void on_frame(const Link& connection, wire::Frame frame) override;
  void on_close(const Link& connection, const std::string& reason) override;

 private:
  class Watched;
  using WatchedPtr = std::shared_ptr<Watched>;
  struct Item {
    WatchedPtr link;
    wire::Frame frame;
    bool closes = false;
    std::string reason;
  };

  // Whether nothing was heard since then, of those that could look, for too long.
  bool is_silence(const std::optional<TimePoint>& since) const;
  bool cut_in(const Watched& link) const;
  bool cut_out(const Watched& link) const;
  void take(Item item);
  void give(Item item);
  // Hands on what was kept, as far as nobody keeps it any more.
  void take_kept();
  void give_kept();
  // Silences begin now; of trainers' with this rank, or of all and of the server's.
  void forget_silence(const uint32_t* rank);
  bool send(const WatchedPtr& link, wire::Frame frame);
  void close(const WatchedPtr& link, const std::string& reason);
  void read_push(const wire::Frame& frame) const;
  void note(const char* way, const Watched& link, const wire::Frame& frame, const char* fate);

  const uint32_t shard_;
  const wire::ParamSetLayout& layout_;
  const uint64_t memory_cap_;
  const Pushed pushed_;
  testing::SeededSchedule& schedule_;
  EventLog& events_;
  StalenessWatch watch_;
  uint64_t stale_ = 0;
  bool dead_ = false;
  bool frozen_ = false;
  std::set<uint32_t> frozen_trainers_;
  std::map<uint32_t, uint32_t> cut_in_;  // incarnations
  std::map<uint32_t, uint32_t> cut_out_;
  std::map<uint32_t, uint32_t> killed_;
  std::deque<Item> incoming_;  // kept
  std::deque<Item> outgoing_;
  std::map<const transport::Connection*, WatchedPtr> links_;
  server::Server server_;  // goes first
};

}  // namespace cpudist::simulator
