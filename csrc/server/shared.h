// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the parameter sets of a server share: its trainers, its threads and its memory.
#pragma once

#include <memory>
#include <utility>

#include "server/counters.h"
#include "server/memory.h"
#include "server/options.h"
#include "server/peers.h"
#include "server/sequencer.h"
#include "server/snapshot/writer.h"
#include "server/update/pool.h"
#include "table/ahead.h"

namespace cpudist::server {

// Outlives the parameter sets.
struct ServerShared {
  explicit ServerShared(ServerOptions given)
      : options(std::move(given)),
        sequencer(options.trainer_count, counters),
        peers(options, counters, sequencer),
        updates(options.threads),
        memory(options, counters),
        snapshots({.shard_id = options.shard_id,
                   .host = options.host,
                   .directory = options.snapshot_dir,
                   .memory_bytes = options.snapshot_memory_bytes,
                   .files = options.files,
                   .cap = memory.count()}) {
    memory.when_short([this] { snapshots.give_up_for_memory(); });
  }

  const ServerOptions options;
  ServerCounters counters;
  Sequencer sequencer;
  Peers peers;
  UpdatePool updates;
  ServerMemory memory;
  SnapshotWriter snapshots;
  // Makes memory for rows; its thread begins where a table has more than one slab.
  std::shared_ptr<table::MemoryAhead> ahead = std::make_shared<table::MemoryAhead>();
};

}  // namespace cpudist::server
