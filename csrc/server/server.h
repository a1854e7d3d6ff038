// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One parameter server: one shard of every table and the dense blocks placed on it. Requests are
// handled on the channel's threads; nothing here knows Python. Rounds, exactly-once and membership
// are described in docs/mechanisms.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/channel.h"

namespace cpudist::server {

struct ServerOptions {
  uint64_t run_id = 0;
  uint32_t shard_id = 0;
  uint32_t server_count = 1;
  uint32_t trainer_count = 1;
  uint32_t threads = 1;                // threads that update one round together
  uint64_t liveness_ms = 5000;         // a trainer silent for so long is lost
  uint64_t reconnect_grace_ms = 500;   // a trainer whose link broke is lost after this
  uint64_t join_deadline_ms = 600000;  // every trainer must have said hello by then
  // Trainers of groups of their own: more than trainer_count may come, a lost one may come back as
  // a newer incarnation, and who updates on arrival goes on without it.
  bool elastic = false;
  uint64_t rejoin_ms = 600000;    // elastic: how long a lost trainer is waited for at the end
  uint64_t memory_cap_bytes = 0;  // of pushes that come in or wait; 0 = no cap
  std::string host;               // "host pid 12", for messages
  // Rows in the reply to a push of deltas; more stay for the next, so that neither side needs room
  // for a whole table.
  uint64_t changes_bytes = 32u << 20;
};

struct ServerStats {
  uint64_t rounds = 0;
  uint64_t pushes = 0;
  uint64_t duplicates = 0;  // requests answered from the record of the last reply
  uint64_t bytes_received = 0;
  uint64_t bytes_sent = 0;
  uint64_t rows = 0;
  uint64_t table_bytes = 0;    // row records and their index
  uint64_t dense_bytes = 0;    // blocks and their state
  uint64_t marks_bytes = 0;    // deltas: which rows trainers are to be told of
  uint64_t backup_bytes = 0;   // delay compensation: what trainers have read, running means
  uint64_t pending_bytes = 0;  // pushes waiting for their round
  uint64_t connections = 0;
  uint64_t refused = 0;   // handshakes refused, malformed frames
  uint64_t trainers = 0;  // connected ever
  uint64_t lost = 0;      // lost now
};

class Server final : public transport::ConnectionHandler {
 public:
  explicit Server(ServerOptions options);
  ~Server() override;  // stop()

  // Channels deliver here; any thread, any number of listeners. The caller keeps the Listener and
  // stops it before the Server goes.
  void on_open(const std::shared_ptr<transport::Connection>& connection) override;
  void on_frame(const std::shared_ptr<transport::Connection>& connection,
                wire::Frame frame) override;
  Buffer payload_memory(const wire::FrameHeader& header,
                        const std::shared_ptr<BufferPool>& pool) override;
  void on_close(const std::shared_ptr<transport::Connection>& connection,
                const std::string& reason) override;

  // Waits until every trainer has said goodbye (true) or the deadline passed (false). Throws
  // Error(kPeerLost) once a trainer is lost; elastic: a trainer that has been lost for rejoin_ms
  // counts as gone.
  bool wait_done(TimePoint deadline);
  // Refuses further requests, answers what waits with Error(kPeerLost), which carries `reason`.
  // Idempotent.
  void stop(const std::string& reason = {});
  ServerStats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cpudist::server
