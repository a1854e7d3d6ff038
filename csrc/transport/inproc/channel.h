// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frames between a client and a server of the same process: a rank talking to its own server, and
// ranks that are threads of one test. Without faults a frame is handed over in the sender's thread;
// with faults a delivery thread drops, duplicates, delays, reorders and cuts as the plan says.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/channel.h"
#include "wire/handshake/handshake.h"

namespace cpudist::transport {

struct FaultPlan {  // probabilities in [0, 1], drawn per frame from one seeded generator
  double drop = 0;
  double duplicate = 0;
  double reorder = 0;  // swapped with a later frame of the link
  double delay = 0;
  uint64_t delay_ms_max = 0;
  double cut = 0;  // the link closes instead of delivering
  uint64_t seed = 0;
  bool any() const { return drop > 0 || duplicate > 0 || reorder > 0 || delay > 0 || cut > 0; }
};

struct FaultCounts {  // what really happened; tests assert that faults fired
  uint64_t delivered = 0, dropped = 0, duplicated = 0, reordered = 0, delayed = 0, cut = 0;
};

class InprocNetwork : public std::enable_shared_from_this<InprocNetwork> {
 public:
  static std::shared_ptr<InprocNetwork> create(const FaultPlan& plan = {});
  virtual ~InprocNetwork() = default;
  // Address "inproc:NAME". Throws Error(kAddress) if the name is taken. With credentials both ends
  // prove theirs before the first frame where there are faults; else nobody else can be there.
  virtual std::unique_ptr<Listener> listen(
      const std::string& name, ConnectionHandler* handler,
      std::shared_ptr<const wire::Credentials> credentials = nullptr) = 0;
  virtual std::shared_ptr<Connector> connector(
      ConnectionHandler* handler, std::shared_ptr<const wire::Credentials> credentials = nullptr,
      uint64_t handshake_deadline_ms = ChannelLimits().handshake_deadline_ms) = 0;
  virtual FaultCounts counts() const = 0;
};

// Picks the connector by address scheme ("inproc:", "unix:" and "tcp:", "c10d:"); each may be null.
std::shared_ptr<Connector> make_connector(std::shared_ptr<Connector> inproc,
                                          std::shared_ptr<Connector> tcp,
                                          std::shared_ptr<Connector> ranks = nullptr);

}  // namespace cpudist::transport
