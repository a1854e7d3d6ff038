// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frames between the ranks of a group over a RankTransport, for fabrics that only a collective
// backend reaches. Two ranks share one lane, which carries the connections of both directions; what
// breaks a lane breaks it for good, because a backend's pair cannot be made again.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/channel.h"
#include "transport/ranks/transport.h"

namespace cpudist::transport {

class RankNetwork {
 public:
  // Opens a lane to each of `peers`, with two threads. Throws Error(kInvalidArgument) for a rank
  // that is none of the group's, is this one, or comes twice.
  static std::shared_ptr<RankNetwork> create(std::shared_ptr<RankTransport> transport,
                                             const std::vector<uint32_t>& peers,
                                             const ChannelLimits& limits = {});
  virtual ~RankNetwork() = default;
  // Address "c10d:RANK". Throws Error(kAddress) if this rank listens already.
  virtual std::unique_ptr<Listener> listen(ConnectionHandler* handler) = 0;
  // One at a time, with one connection per peer.
  virtual std::shared_ptr<Connector> connector(ConnectionHandler* handler) = 0;
  // Says goodbye to every peer and waits for theirs, shortly; then ends all threads and lets go of
  // the transport. Idempotent; not from a callback. After it no callback runs.
  virtual void stop() = 0;
};

}  // namespace cpudist::transport
