// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The network: a lane per peer, who listens, who connects.

#include "transport/ranks/channel.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "transport/ranks/lane.h"

namespace cpudist::transport {
namespace ranks {
namespace {

constexpr std::string_view kScheme = "c10d:";
// How long stop() waits for the goodbyes of all peers.
constexpr auto kPatience = std::chrono::milliseconds(300);

uint32_t parse_address(const std::string& address) {
  const std::string_view text = address;
  uint32_t rank = 0;
  if (text.starts_with(kScheme)) {
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data() + kScheme.size(), end, rank);
    if (error == std::errc() && rest == end) return rank;
  }
  throw Error(ErrorCode::kAddress,
              "expected an address c10d:RANK, found '" + address.substr(0, 200) + "'");
}

class Network;

class RankListener final : public Listener {
 public:
  RankListener(std::shared_ptr<Network> network, std::shared_ptr<Port> port);
  ~RankListener() override { stop(); }
  RankListener(const RankListener&) = delete;
  RankListener& operator=(const RankListener&) = delete;
  std::vector<std::string> addresses() const override;
  void stop() override;

 private:
  const ProcessGuard guard_;
  const std::shared_ptr<Network> network_;
  const std::shared_ptr<Port> port_;
};

class RankConnector final : public Connector {
 public:
  RankConnector(std::shared_ptr<Network> network, ConnectionHandler* handler)
      : network_(std::move(network)), port_(std::make_shared<Port>(Side::kClient, handler)) {}
  ~RankConnector() override { stop(); }
  RankConnector(const RankConnector&) = delete;
  RankConnector& operator=(const RankConnector&) = delete;
  // Never waits: the lane is there or broken.
  std::shared_ptr<Connection> connect(const std::string& address, TimePoint) override;
  void stop() override {
    if (!guard_.forked()) port_->stop("the connector stopped");
  }

 private:
  const ProcessGuard guard_;
  const std::shared_ptr<Network> network_;
  const std::shared_ptr<Port> port_;
};

class Network final : public RankNetwork, public std::enable_shared_from_this<Network> {
 public:
  Network(std::shared_ptr<RankTransport> transport, const std::vector<uint32_t>& peers,
          const ChannelLimits& limits)
      : rank_(transport->rank()) {
    const auto pool = std::make_shared<BufferPool>(kPoolBytes);
    for (const uint32_t peer : peers) {
      const auto lane = std::make_shared<Lane>(transport, peer, limits, pool);
      const bool valid = peer < transport->size() && peer != rank_;
      if (!valid || !lanes_.emplace(peer, lane).second) {
        throw Error(ErrorCode::kInvalidArgument,
                    "rank " + std::to_string(peer) + " is not another rank of a group of " +
                        std::to_string(transport->size()) + ", or is given twice");
      }
    }
    try {
      for (const auto& [peer, lane] : lanes_) lane->start();
    } catch (...) {
      for (const auto& [peer, lane] : lanes_) lane->stop();
      throw;
    }
  }
  ~Network() override {
    if (!guard_.forked()) stop();
  }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  std::unique_ptr<Listener> listen(ConnectionHandler* handler) override {
    guard_.check("network of ranks");
    auto port = std::make_shared<Port>(Side::kServer, handler);
    const std::lock_guard lock(mutex_);
    if (served_) throw Error(ErrorCode::kAddress, "this rank listens at " + address() + " already");
    served_ = port;
    for (const auto& [peer, lane] : lanes_) lane->serve(port);
    return std::make_unique<RankListener>(shared_from_this(), std::move(port));
  }

  std::shared_ptr<Connector> connector(ConnectionHandler* handler) override {
    guard_.check("network of ranks");
    return std::make_shared<RankConnector>(shared_from_this(), handler);
  }

  void stop() override {
    if (guard_.forked()) return;
    for (const auto& [peer, lane] : lanes_) lane->say_goodbye();
    const TimePoint deadline = Clock::now() + kPatience;
    for (const auto& [peer, lane] : lanes_) lane->wait_ended(deadline);
    for (const auto& [peer, lane] : lanes_) lane->stop();
  }

  std::string address() const { return std::string(kScheme) + std::to_string(rank_); }

  void end_listening(const std::shared_ptr<Port>& port) {
    const std::lock_guard lock(mutex_);
    if (served_ != port) return;
    served_.reset();
    for (const auto& [peer, lane] : lanes_) lane->serve(nullptr);
  }

  std::shared_ptr<Connection> connect(const std::string& to, const std::shared_ptr<Port>& port) {
    guard_.check("network of ranks");
    const auto found = lanes_.find(parse_address(to));
    if (found == lanes_.end()) {
      throw Error(ErrorCode::kAddress, "this rank has no link to " + to);
    }
    return found->second->connect(port);
  }

 private:
  const ProcessGuard guard_;
  const uint32_t rank_;
  std::map<uint32_t, std::shared_ptr<Lane>> lanes_;  // fixed once made
  std::mutex mutex_;
  std::shared_ptr<Port> served_;
};

RankListener::RankListener(std::shared_ptr<Network> network, std::shared_ptr<Port> port)
    : network_(std::move(network)), port_(std::move(port)) {}

std::vector<std::string> RankListener::addresses() const { return {network_->address()}; }

void RankListener::stop() {
  if (guard_.forked()) return;
  network_->end_listening(port_);
  port_->stop("the server stopped listening");
}

std::shared_ptr<Connection> RankConnector::connect(const std::string& address, TimePoint) {
  return network_->connect(address, port_);
}

}  // namespace
}  // namespace ranks

std::shared_ptr<RankNetwork> RankNetwork::create(std::shared_ptr<RankTransport> transport,
                                                 const std::vector<uint32_t>& peers,
                                                 const ChannelLimits& limits) {
  return std::make_shared<ranks::Network>(std::move(transport), peers, limits);
}

}  // namespace cpudist::transport
