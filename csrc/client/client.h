// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A trainer's end: talks to every server, retries, reconnects, numbers its requests, and opens
// parameter sets, which pack pushes straight from gradients and write pulled rows straight into the
// trainer's weights.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/options.h"
#include "client/param_set.h"
#include "client/stats.h"
#include "wire/messages.h"

namespace cpudist::client {

// Thread safety: any thread. No call is made with the GIL held. Interrupts and timeouts: as for
// ParamSet.
class Client {
 public:
  Client(ClientOptions options, const ConnectorFactory& make_connector);
  ~Client();  // closes the links without a goodbye; bounded
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  void connect();  // hello with every server; throws kPeerLost, kAddress, kConfigMismatch, kFenced

  // The n-th open of every trainer names the same parameter set.
  std::shared_ptr<ParamSet> open(const wire::ParamSetLayout& layout,
                                 const CacheLimits& limits = {});
  void barrier();      // leaves every parameter set, waits for all, rejoins all
  void goodbye();      // to every server; then disconnects
  void check() const;  // throws what the client has failed with: a lost server
  // Where connect() has thrown kFenced: the incarnation that servers have in the place of this one.
  uint32_t fenced_by() const { return shared_.session.fenced_by(); }
  // Whether a server has counted this trainer as lost, and whether the process of one has ended;
  // see Session.
  bool counted_lost() const { return shared_.session.counted_lost(); }
  bool out_of_reach() const { return shared_.session.out_of_reach(); }
  bool server_ended() const { return shared_.session.server_ended(); }
  // Per server: the last request of this trainer, in the last incarnation before this one that had
  // any carried out, that was; 0: there is none. As of connect().
  std::vector<uint64_t> carried_out_before() const { return shared_.session.carried_out_before(); }
  void abort(const std::string& reason);  // ends every wait of this client with Error(kClosed)
  ClientStats stats() const;
  std::vector<TableTraffic> table_traffic() const;  // of all open sets

 private:
  Shared shared_;
  uint32_t next_set_ = 0;  // both under Shared::sequence()
  bool said_goodbye_ = false;
};

}  // namespace cpudist::client
