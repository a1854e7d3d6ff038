// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Dense gradients that have come before the push that they belong to. Nothing follows from them
// until that push names them: rounds, cuts and losses know of pushes only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "base/buffer.h"
#include "server/counters.h"
#include "wire/layout.h"
#include "wire/push.h"

namespace cpudist::server {

struct Push;

// One frame of them.
struct PushPart {
  Buffer payload;        // what `view` points into
  CountedBytes pending;  // those of the payload
  wire::PartView view;
};

// Thread safety: all members.
class PushParts {
 public:
  // Keeps what came from a trainer for its push of a round. A block that is here for this round
  // already stays as it is, as the same frame may come twice; what was kept for other rounds goes,
  // or, of a later one than the part's, stays alone. Throws kInvalidArgument for a block of another
  // server, and MalformedFrame.
  void keep(uint32_t rank, Buffer payload, const wire::ParamSetLayout& layout, uint32_t shard,
            ServerCounters& counters);
  // Whether all is there of a push, or it is to be sent again: at once, or when its sender asks.
  enum class Found { kAll, kSendAgain, kWait };
  // Gives the sections of a push that have no values those that came before. One that has not come
  // was lost, and comes again. Throws kInvalidArgument for a block of another server, kProtocol
  // where one still has not come after the push has many times.
  [[nodiscard]] Found complete(const wire::ParamSetLayout& layout, uint32_t shard, Push* push);
  void taken(uint32_t rank, uint64_t round);  // its push was: what comes for the round comes late
  void forget(uint32_t rank);                 // its push is not going to come
  void clear();                               // rounds are counted anew

 private:
  struct Block {
    std::shared_ptr<const PushPart> part;
    std::span<const uint8_t> values;
  };
  struct Kept {
    uint64_t round = 0;
    std::map<uint32_t, Block> blocks;
    uint32_t missed = 0;  // pushes of the round of which something was missing
  };

  mutable std::mutex mutex_;
  std::map<uint32_t, Kept> kept_;  // by rank
};

}  // namespace cpudist::server
