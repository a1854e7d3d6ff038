// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the parameter sets of a server share: its trainers, its threads and its memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "base/buffer.h"
#include "server/counters.h"
#include "server/peers.h"
#include "server/sequencer.h"
#include "server/server.h"
#include "server/update_pool.h"

namespace cpudist::server {

inline constexpr size_t kPoolBytes = size_t{256} << 20;

// Outlives the parameter sets.
struct ServerShared {
  explicit ServerShared(ServerOptions given)
      : options(std::move(given)),
        sequencer(options.trainer_count, counters),
        peers(options, counters, sequencer),
        updates(options.threads),
        pushes_memory(std::make_shared<MemoryCap>(options.memory_cap_bytes)),
        pushes_pool(std::make_shared<BufferPool>(
            std::min<uint64_t>(options.memory_cap_bytes, kPoolBytes))) {}

  const ServerOptions options;
  ServerCounters counters;
  Sequencer sequencer;
  Peers peers;
  UpdatePool updates;
  // With a cap: what received pushes hold, from their header to their update.
  const std::shared_ptr<MemoryCap> pushes_memory;
  const std::shared_ptr<BufferPool> pushes_pool;
  std::shared_ptr<BufferPool> pool = std::make_shared<BufferPool>(kPoolBytes);
};

}  // namespace cpudist::server
