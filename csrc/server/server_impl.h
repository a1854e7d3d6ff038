// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The inside of a Server: which request goes where. Lock order: registry, parameter set, peers,
// sequencer; no frame is sent with one of them held.
#pragma once

#include <map>
#include <memory>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "server/param_set.h"
#include "server/server.h"

namespace cpudist::server {

struct Server::Impl {
  explicit Impl(ServerOptions options);
  ~Impl();

  void on_frame(const std::shared_ptr<transport::Connection>& connection, wire::Frame frame);
  void stop(const std::string& reason);
  ServerStats stats() const;

  ServerShared shared;

 private:
  using Link = std::shared_ptr<transport::Connection>;

  void dispatch(const Link& connection, wire::Frame& frame, Outbox& outbox);
  void greet(const Link& connection, const wire::Frame& frame, Outbox& outbox);
  void probe(const Link& connection, const wire::FrameHeader& header, Outbox& outbox);
  void read(const Link& connection, const wire::Frame& frame, Outbox& outbox);
  Buffer read_set(const wire::Frame& frame) const;
  void sequenced(const Link& connection, wire::Frame& frame, Outbox& outbox);
  void apply(const Ticket& ticket, wire::Frame& frame, Outbox& outbox);

  void open(const Ticket& ticket, wire::Frame& frame, Outbox& outbox);
  void close(const Ticket& ticket, uint32_t param_set, Outbox& outbox);
  void barrier(const Ticket& ticket, Outbox& outbox);
  void goodbye(const Ticket& ticket, Outbox& outbox);
  // With the registry held: ends the barrier once everybody who is still there has arrived.
  void try_end_barrier(Outbox& outbox);
  void drop_unused();
  bool goes_on_without_lost() const;  // with the registry held

  void watch();  // the liveness thread
  void lose(uint32_t rank, const Error& error, Outbox& outbox);
  void fail_waiting(const Error& error, Outbox& outbox);
  std::shared_ptr<ParamSet> find(uint32_t param_set) const;  // throws kInvalidArgument
  std::vector<uint32_t> waiting_for(const ProbeResult& request, uint32_t rank) const;

  mutable std::shared_mutex registry_mutex_;  // sets_ and barrier_
  std::map<uint32_t, std::shared_ptr<ParamSet>> sets_;
  std::map<uint32_t, Ticket> barrier_;  // who has arrived
  std::thread watcher_;
};

}  // namespace cpudist::server
