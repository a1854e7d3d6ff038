// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The parts of a client: its session, its parameter sets, and the sequenced operation that an
// interrupt has left behind.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "client/client.h"
#include "client/coding.h"
#include "client/param_set.h"
#include "client/queue.h"
#include "client/session.h"

namespace cpudist::client {

// A sequenced operation in stages: send to all servers, wait for all, take the answers in. An
// interrupt or timeout stops it in a wait; it is resumed by the next call.
struct Operation {
  struct Stage {
    std::function<std::vector<RequestPtr>()> send;
    std::function<void(std::span<const RequestPtr>)> receive;
  };
  std::vector<Stage> stages;
  size_t next = 0;
  bool sent = false;
  bool detached = false;  // its caller has gone: memory of the caller must not be touched
  std::vector<RequestPtr> in_flight;
};
using OperationPtr = std::shared_ptr<Operation>;

// A push of a round, as its answers find it.
struct RoundInFlight {
  bool detached = false;
  std::span<void* const> weights;   // where dense values go, unless it is detached
  std::vector<wire::Version> read;  // per server, what its gradient was computed on
  uint64_t samples = 0;
};

inline constexpr uint64_t kChunkBytes = 8ull << 20;

inline wire::Version dense_version_of(const ClientSet& set, const wire::Frame& reply) {
  return unpack_dense(set, reply, {});
}

inline std::span<const uint8_t> payload_of(const RequestPtr& request) {
  return {request->reply.payload.data(), request->reply.payload.size()};
}

struct Client::Impl {
  Impl(ClientOptions options, const ConnectorFactory& make_connector);

  ClientSetPtr find(uint32_t param_set);
  uint32_t server_count() const { return session.server_count(); }

  // ---- operations; the caller holds sequenced_mutex ----
  void drive(const OperationPtr& operation);
  void finish_unfinished();
  // One request with this payload to every server.
  std::vector<RequestPtr> send_all(wire::FrameKind kind, uint32_t param_set,
                                   const std::function<Buffer()>& payload);
  // A whole operation of one such stage.
  void run_all(wire::FrameKind kind, uint32_t param_set, const std::function<Buffer()>& payload,
               std::function<void(std::span<const RequestPtr>)> receive);
  void join(const ClientSetPtr& set);
  bool agree(const wire::BarrierReply& first, const wire::BarrierReply& second);
  // Throws kClosed if the last push was refused by some servers and taken by others.
  void check_whole(ClientSet& set);
  void finish_round(ClientSet& set, const RoundInFlight& round,
                    std::span<const RequestPtr> replies);

  // ---- updates on arrival ----
  std::shared_ptr<PushQueue> queue_of(const ClientSet& set);  // null: it has none
  void take_arrived(ClientSet& set, PushQueue& queue, std::span<void* const> weights);
  // What is queued comes before any other request that changes a server. Without locks.
  void drain_queues();
  void stop_queues();
  void stop_queue(ClientSet& set);  // without locks: its thread may wait for one
  void add_queue_stats(ClientStats* stats);
  std::vector<std::shared_ptr<PushQueue>> queues();

  // ---- idempotent requests ----
  // Before a read: an interrupted step is finished first, so that the read sees it.
  void settle();
  // Rows that are here or on their way are not to be used any more.
  void forget_rows(ClientSet& set);
  // `exact`: as the servers have them, whatever the dtype of pulls.
  void pull_rows(ClientSet& set, uint32_t table, std::span<const int64_t> keys, bool exact);
  void pull_dense(ClientSet& set, std::span<void* const> weights);

  Session session;
  wire::Pool pool;
  std::vector<uint16_t> owners;  // server of each bucket
  std::mutex sets_mutex;
  std::map<uint32_t, ClientSetPtr> sets;
  ClientStats closed_queues;       // of sets that were closed
  StalenessStats group_staleness;  // of rounds beside which other groups have theirs
  std::mutex sequenced_mutex;      // taken before the session's and a table's
  uint32_t next_set = 0;
  bool said_goodbye = false;
  OperationPtr unfinished;
  std::atomic<bool> has_unfinished{false};
  std::atomic<uint64_t> rows_pulled{0};
  std::atomic<uint64_t> rows_pushed{0};
  std::atomic<uint64_t> rows_prefetched{0};
  std::atomic<uint64_t> prefetch_hits{0};
  std::atomic<uint64_t> prefetch_refreshed{0};
};

// The round that every reply names; throws kProtocol if they differ. Servers that update on arrival
// need not agree: 0 then.
uint64_t agreed_round(const ClientSet& set, std::span<const RequestPtr> replies);

}  // namespace cpudist::client
