// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What Python objects hold: everything they need alive, released in an order that is safe, and not
// at all in a forked child.
#pragma once

#include <memory>
#include <utility>

#include "bind/bind.h"
#include "transport/inproc/channel.h"
#include "transport/ranks/channel.h"

namespace cpudist::bind {

class NetworkHolder {
 public:
  explicit NetworkHolder(const transport::FaultPlan& plan)
      : network_(std::make_unique<std::shared_ptr<transport::InprocNetwork>>(
            transport::InprocNetwork::create(plan))) {}
  ~NetworkHolder() {
    if (network_.forked()) return;
    // The last owner joins the delivery thread.
    const GilReleased no_gil;
    network_.get("network").reset();
  }
  NetworkHolder(const NetworkHolder&) = delete;
  NetworkHolder& operator=(const NetworkHolder&) = delete;

  const std::shared_ptr<transport::InprocNetwork>& get() const { return network_.get("network"); }

 private:
  ForkSafe<std::shared_ptr<transport::InprocNetwork>> network_;
};

class RankNetworkHolder {
 public:
  explicit RankNetworkHolder(std::shared_ptr<transport::RankNetwork> network)
      : network_(std::make_unique<std::shared_ptr<transport::RankNetwork>>(std::move(network))) {}
  ~RankNetworkHolder() {
    if (network_.forked()) return;
    const GilReleased no_gil;
    network_.get("network").reset();
  }
  RankNetworkHolder(const RankNetworkHolder&) = delete;
  RankNetworkHolder& operator=(const RankNetworkHolder&) = delete;

  const std::shared_ptr<transport::RankNetwork>& get() const { return network_.get("network"); }

 private:
  ForkSafe<std::shared_ptr<transport::RankNetwork>> network_;
};

}  // namespace cpudist::bind
