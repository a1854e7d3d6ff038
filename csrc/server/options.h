// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a server is told when it is made, and what it tells of itself.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/file_calls.h"

namespace cpudist::server {

// What becomes of a push with gradients that are infinite or NaN.
enum class NonFinite : uint32_t {
  kRaise = 0,  // its sender, and who waits for its round, are told; nothing of it is applied
  kSkip = 1,   // as if it had no gradients; of deltas as kRaise
  kApply = 2,
};

struct ServerOptions {
  uint64_t run_id = 0;
  uint32_t shard_id = 0;
  uint32_t server_count = 1;
  uint32_t trainer_count = 1;
  uint32_t threads = 1;                // threads that update one round together
  uint64_t liveness_ms = 5000;         // a trainer silent for so long is lost
  uint64_t reconnect_grace_ms = 500;   // a trainer whose link broke is lost after this
  uint64_t join_deadline_ms = 600000;  // every trainer must have said hello by then
  // Trainers of groups of their own: more than trainer_count may come, a lost one may come back as
  // a newer incarnation, and who updates on arrival goes on without it.
  bool elastic = false;
  // Elastic: connected beyond trainer_count at a time; 0: what a quarter of the file descriptors
  // is enough for.
  uint64_t more_trainers = 0;
  uint64_t rejoin_ms = 600000;    // elastic: how long a lost trainer is waited for at the end
  uint64_t memory_cap_bytes = 0;  // of ServerStats::memory_bytes; 0 = no cap
  NonFinite nonfinite = NonFinite::kRaise;
  std::string host;  // "host pid 12", for messages
  // Rows in the reply to a push of deltas; more stay for the next, so that neither side needs room
  // for a whole table.
  uint64_t changes_bytes = 32u << 20;
  std::string snapshot_dir;  // where snapshots are; empty: nowhere
  // Of rows that change before a snapshot has written them.
  uint64_t snapshot_memory_bytes = 512ull << 20;
  std::shared_ptr<files::Calls> files;  // of snapshots; null: those of the system
};

struct TableStats {
  uint32_t param_set = 0;
  std::string name;
  bool remote = false;
  uint64_t rows = 0;             // that take memory
  uint64_t bytes = 0;            // row records, their index, and what admission counts in
  uint64_t created = 0;          // rows that pushes have made, ever
  uint64_t filtered = 0;         // rows of pushes that were dropped: their keys are not admitted
  uint64_t evicted = 0;          // rows that have gone, ever
  uint64_t unknown_reads = 0;    // of keys without a row
  std::vector<uint64_t> pushed;  // rows of pushes, by bucket of their keys
};

struct ServerStats {
  uint64_t rounds = 0;
  uint64_t pushes = 0;
  uint64_t nonfinite = 0;   // of them, those that had no finite gradients
  uint64_t duplicates = 0;  // requests answered from the record of the last reply
  uint64_t bytes_received = 0;
  uint64_t bytes_sent = 0;
  uint64_t rows = 0;
  uint64_t table_bytes = 0;     // row records and their index
  uint64_t dense_bytes = 0;     // blocks and their state
  uint64_t marks_bytes = 0;     // deltas: which rows trainers are to be told of
  uint64_t backup_bytes = 0;    // delay compensation: what trainers have read, running means
  uint64_t pending_bytes = 0;   // pushes waiting for their round
  uint64_t snapshot_bytes = 0;  // rows that changed before a snapshot has written them
  uint64_t snapshot_waits = 0;  // pushes that waited for a snapshot to get on, ever
  uint64_t memory_bytes = 0;  // values, pushes under way, free blocks of pools: what the cap counts
  uint64_t connections = 0;
  uint64_t refused = 0;   // handshakes refused, malformed frames
  uint64_t trainers = 0;  // connected ever
  uint64_t lost = 0;      // lost now
  uint64_t present = 0;   // connected, and neither lost nor done
};

}  // namespace cpudist::server
