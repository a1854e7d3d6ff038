// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Servers of one run on a network within this process, and clients of theirs.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "client/param_set.h"
#include "server/server.h"
#include "support/channel_fixture.h"
#include "support/handshake_fixture.h"
#include "transport/inproc/channel.h"

namespace cpudist::testing {

// Clients go before it does.
class InprocServers {
 public:
  // `last_cap_bytes`: memory cap of the last server. `secret`: empty: links have no key.
  InprocServers(uint32_t trainer_count, uint32_t server_count, const transport::FaultPlan& plan,
                uint64_t last_cap_bytes = 0, std::string secret = {})
      : trainer_count_(trainer_count),
        network_(transport::InprocNetwork::create(plan)),
        secret_(std::move(secret)) {
    server::ServerOptions options;
    options.run_id = 7;
    options.server_count = server_count;
    options.trainer_count = trainer_count;
    options.reconnect_grace_ms = 20000;
    for (uint32_t s = 0; s < server_count; ++s) {
      options.shard_id = s;
      options.memory_cap_bytes = s + 1 == server_count ? last_cap_bytes : 0;
      servers_.push_back(std::make_unique<server::Server>(options));
      listeners_.push_back(network_->listen("server" + std::to_string(s), servers_[s].get(),
                                            credentials(a_server(static_cast<uint16_t>(s)))));
      addresses_.push_back(listeners_[s]->addresses());
    }
  }
  ~InprocServers() {
    for (const auto& server : servers_) server->stop();
    for (const auto& listener : listeners_) listener->stop();
  }
  InprocServers(const InprocServers&) = delete;
  InprocServers& operator=(const InprocServers&) = delete;

  client::ClientOptions client_options(uint32_t rank) const {
    client::ClientOptions options;
    options.rpc_retries = 1000;  // plans lose frames and links far more often than any network
    options.run_id = 7;
    options.trainer_rank = rank;
    options.trainer_count = trainer_count_;
    options.reconnect_grace_ms = 20000;
    options.probe_ms = 10;
    options.resend_ms = 10;
    options.round_deadline_ms = 20000;
    options.servers = addresses_;
    return options;
  }
  std::unique_ptr<client::Client> make_client(client::ClientOptions options) {
    wire::Identity own = a_trainer(static_cast<uint16_t>(options.trainer_rank));
    own.incarnation = options.incarnation;
    return std::make_unique<client::Client>(
        std::move(options), [this, own](transport::ConnectionHandler* handler) {
          return make_connector(network_->connector(handler, credentials(own)), nullptr);
        });
  }
  transport::FaultCounts faults() const { return network_->counts(); }

 private:
  std::shared_ptr<const wire::Credentials> credentials(const wire::Identity& own) const {
    return secret_.empty() ? nullptr : with_key(own, secret_);
  }

  uint32_t trainer_count_;
  std::shared_ptr<transport::InprocNetwork> network_;
  std::string secret_;
  std::vector<std::unique_ptr<server::Server>> servers_;
  std::vector<std::unique_ptr<transport::Listener>> listeners_;
  std::vector<std::vector<std::string>> addresses_;
};

// Connects, and opens a set of one table and one parameter; trainer 0 gives them their values.
inline std::shared_ptr<client::ParamSet> open_with_values(client::Client& client, uint32_t rank,
                                                          const wire::ParamSetLayout& layout,
                                                          std::vector<float>& table,
                                                          std::vector<float>& dense) {
  client.connect();
  auto set = client.open(layout);
  if (rank == 0) {
    std::vector<int64_t> keys(layout.tables[0].rows);
    std::iota(keys.begin(), keys.end(), 0);
    set->store_table(0, keys, table.data(), nullptr, nullptr, 0);
    set->store_parameter(0, dense.data(), nullptr, 0);
  }
  set->ready();
  set->bind_table(0, table.data());
  std::vector<void*> weights{dense.data()};
  set->pull_dense(weights);
  return set;
}

}  // namespace cpudist::testing
