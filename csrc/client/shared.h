// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the parameter sets of a client share: its session, its memory, the sequenced operations on
// the servers, of which one runs at a time, and the counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "client/huge_pages.h"
#include "client/options.h"
#include "client/session.h"
#include "client/stats.h"
#include "wire/messages.h"

namespace cpudist::client {

class ParamSet;

// A sequenced operation in stages: send to servers, wait for all, take the answers in. An interrupt
// or timeout stops it in a wait; it is resumed by the next call.
class Operation {
 public:
  Operation() = default;
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  std::span<const RequestPtr> in_flight() const { return in_flight_; }

 private:
  friend class Shared;
  virtual size_t stage_count() const { return 1; }
  virtual std::vector<RequestPtr> send(size_t stage) = 0;
  virtual void receive(size_t stage, std::span<const RequestPtr> replies) = 0;
  // Its caller has gone: no memory of the caller's may be touched any more. The stage that is under
  // way has been sent.
  virtual void detach() {}

  size_t stage_ = 0;
  bool sent_ = false;
  std::vector<RequestPtr> in_flight_;
};

// Locks: `sequenced_` is taken before the session's, a set's and a table's.
class Shared {
 public:
  using Send = std::function<std::vector<RequestPtr>()>;
  using Receive = std::function<void(std::span<const RequestPtr>)>;
  using Lock = std::unique_lock<std::mutex>;

  Shared(ClientOptions options, const ConnectorFactory& make_connector);
  uint32_t server_count() const { return session.server_count(); }

  // ---- sequenced operations ----
  // Begins one: no other runs until the lock is given back. Finishes what an interrupt has left.
  [[nodiscard]] Lock sequence();
  // Begins one without what an interrupt has left, which nobody will finish any more.
  [[nodiscard]] Lock sequence_last();
  // Before a read: an interrupted step is finished first, so that the read sees it.
  void settle();
  bool has_unfinished() const { return has_unfinished_; }
  std::mutex& sequenced() { return sequenced_; }

  // The caller has called sequence().
  void drive(const std::shared_ptr<Operation>& operation);
  // An operation of one stage.
  void run(Send send, Receive receive);
  // One request with this payload to every server.
  std::vector<RequestPtr> send_all(wire::FrameKind kind, uint32_t param_set,
                                   const std::function<Buffer()>& payload);
  // An operation that sends one request with this payload to every server.
  void run_all(wire::FrameKind kind, uint32_t param_set, std::function<Buffer()> payload,
               Receive receive);

  // ---- parameter sets ----
  void add(const std::shared_ptr<ParamSet>& set);
  // It is closed, and kept until release_closed(): its end may wait for a thread that waits for the
  // lock of the operation which has closed it.
  void remove(uint32_t id);
  void release_closed();                                // without locks
  std::shared_ptr<ParamSet> find(uint32_t id) const;    // null: not open
  std::vector<std::shared_ptr<ParamSet>> sets() const;  // that are open

  // ---- counters ----
  void count_closed(const ClientStats& stats);  // of a set that was closed
  // Of a round beside which other groups of trainers have theirs.
  void count_round(std::span<const wire::Version> read, std::span<const wire::Version> applied,
                   uint64_t samples);
  void add_stats(ClientStats* stats) const;

  Session session;
  const wire::Pool pool;
  std::vector<uint16_t> owners;  // server of each bucket
  HugePages huge_pages;          // of the weights that tables are bound to
  std::atomic<uint64_t> rows_pulled{0};
  std::atomic<uint64_t> rows_pushed{0};
  std::atomic<uint64_t> rows_prefetched{0};
  std::atomic<uint64_t> prefetch_hits{0};
  std::atomic<uint64_t> prefetch_refreshed{0};

 private:
  void finish_unfinished();

  std::mutex sequenced_;
  std::shared_ptr<Operation> unfinished_;
  std::atomic<bool> has_unfinished_{false};
  mutable std::mutex mutex_;  // of what follows
  std::map<uint32_t, std::shared_ptr<ParamSet>> sets_;
  std::vector<std::shared_ptr<ParamSet>> closed_;
  ClientStats closed_stats_;
  StalenessStats group_staleness_;
};

}  // namespace cpudist::client
