// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One parameter server: one shard of every table and the dense blocks placed on it. Requests are
// handled on the channel's threads; nothing here knows Python. Rounds, exactly-once and membership
// are described in docs/mechanisms.md.
#pragma once

#include <memory>
#include <string>

#include "server/options.h"
#include "transport/channel.h"

namespace cpudist::server {

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
  // Where snapshots are from now on; any thread.
  void set_snapshot_directory(const std::string& path);
  ServerStats stats() const;
  std::vector<TableStats> table_stats() const;  // this server's share of each

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cpudist::server
