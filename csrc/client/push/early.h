// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Dense gradients that go to the servers while others are still being computed, before the push of
// their step. The push says of each whether it is still what it was, byte by byte: so what is
// applied does not depend on what went early.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "client/push/step.h"
#include "client/session.h"
#include "wire/layout.h"

namespace cpudist::client {

// Memory: a copy of each gradient that went early, until its push is sent and the server has
// answered the part; at most kMostBytes for a round, which also fit where frames wait for a slow
// link, so that sending waits for nobody. What is beyond that goes with the push.
//
// Thread safety: all members. The lock is not held while anything is sent.
class EarlyGradients {
 public:
  // Of every server: whether it takes parts, as it has said.
  void set_takers(std::vector<bool> takers) { takers_ = std::move(takers); }
  // Whether one of them is on another host.
  bool has_takers(const Session& session) const;

  // Sends the blocks of these gradients to the servers that take parts and are not of this host,
  // but for those that went early for this round. Returns the bytes of the gradients that went.
  uint64_t send(Session& session, uint32_t set, const wire::ParamSetLayout& layout,
                std::span<const std::vector<uint32_t>> parameter_blocks, uint64_t round,
                std::span<const ParameterGradient> gradients, const wire::Pool& pool);
  // What servers have refused counts as not sent. Before holds().
  void drop_refused(Session& session);
  // Whether a block's gradient went early for this round and is the same.
  bool holds(uint32_t block, uint64_t round, std::span<const uint8_t> gradient);
  // The push of the round goes now: returns the parts that the servers have to answer, too. Counts
  // what of them it has not named.
  std::vector<RequestPtr> take(uint64_t round);
  // There will be no push of the round.
  void drop(Session& session);

  uint64_t sent_bytes() const { return sent_bytes_; }
  // Of those, what no push has named: it had changed, or was not to go at all.
  uint64_t changed_bytes() const { return changed_bytes_; }

 private:
  struct Sent {
    Buffer payload;
    std::span<const uint8_t> values;  // of it
    RequestPtr request;
    bool named = false;  // by the push
  };
  void begin(uint64_t round);
  void forget_blocks();

  static constexpr uint64_t kMostBytes = 256ull << 20;

  std::vector<bool> takers_;
  std::mutex mutex_;
  uint64_t round_ = 0;
  uint64_t round_bytes_ = 0;
  bool closed_ = false;  // nothing goes early for the round any more
  std::map<uint32_t, Sent> blocks_;
  std::vector<RequestPtr> requests_;
  std::atomic<uint64_t> sent_bytes_{0};
  std::atomic<uint64_t> changed_bytes_{0};
};

}  // namespace cpudist::client
