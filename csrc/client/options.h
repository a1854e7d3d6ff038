// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a client is told when it is made.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/channel.h"

namespace cpudist::client {

struct ClientOptions {
  uint64_t run_id = 0;
  uint32_t trainer_rank = 0;
  uint32_t trainer_count = 1;
  uint32_t incarnation = 1;
  uint64_t liveness_ms = 5000;
  uint64_t reconnect_grace_ms = 500;
  uint64_t connect_deadline_ms = 60000;
  uint64_t rpc_deadline_ms = 180000;
  uint64_t round_deadline_ms = 1800000;
  uint64_t probe_ms = 1000;   // how often a waiting sequenced request asks whether it arrived
  uint64_t resend_ms = 1000;  // idempotent requests, only on links that are not reliable()
  // How often one request is sent again because its connection broke before the answer.
  uint32_t rpc_retries = 3;
  uint64_t straggler_log_ms = 30000;
  std::string host;
  // One list per shard, best first; the first that answers is used.
  std::vector<std::vector<std::string>> servers;
  // Called every 50 ms by a waiting thread without locks held; true ends the wait with
  // Error(kInterrupted).
  std::function<bool()> interrupted;
  // Called when a thread of the user's begins to wait, and when it has waited, without locks of
  // the client's that others take while they hold the caller's; must not throw.
  std::function<void(bool begins)> waiting;
  // (level, text): progress of long waits; level 0 warning, 1 info, 2 debug.
  std::function<void(int, const std::string&)> log;
};

// While it lives, the calling thread waits: for who listens.
class WaitNotice {
 public:
  explicit WaitNotice(const ClientOptions& options) : options_(options) {
    if (options_.waiting) options_.waiting(true);
  }
  ~WaitNotice() {
    if (options_.waiting) options_.waiting(false);
  }
  WaitNotice(const WaitNotice&) = delete;
  WaitNotice& operator=(const WaitNotice&) = delete;

 private:
  const ClientOptions& options_;
};

// A connector calls a handler and the handler is inside the client, so the client makes its own.
using ConnectorFactory =
    std::function<std::shared_ptr<transport::Connector>(transport::ConnectionHandler*)>;

}  // namespace cpudist::client
