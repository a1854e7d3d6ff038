// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Counters of a client, over all its parameter sets.
#pragma once

#include <cstdint>
#include <string>

#include "client/push/staleness.h"

namespace cpudist::client {

struct ClientStats {
  uint64_t bytes_sent = 0;  // sum over connections, headers included
  uint64_t bytes_received = 0;
  uint64_t requests = 0;
  uint64_t resent = 0;
  uint64_t reconnects = 0;
  uint64_t rows_pulled = 0;
  uint64_t rows_pushed = 0;
  uint64_t rows_prefetched = 0;      // asked for before a lookup
  uint64_t prefetch_hits = 0;        // rows of a lookup that a prefetch had brought
  uint64_t prefetch_refreshed = 0;   // prefetched rows that came again with a round
  uint64_t cache_dropped = 0;        // values of rows that went before their step did, for memory
  uint64_t residues_dropped = 0;     // rows whose residues went, for memory
  uint64_t early_bytes = 0;          // of gradients that went before their push
  uint64_t early_changed_bytes = 0;  // of which it did not name: they had changed
  uint64_t queued = 0;               // pushes that wait to be sent, now
  double wait_s = 0;                 // blocked on servers, all requests
  double round_wait_s = 0;           // of which in pushes, commits and barriers
  StalenessStats staleness;
};

// What a client has exchanged of one table: frames as they travel, without repeats. Of a frame with
// several parts, what is coded is shared out by what the parts took before.
struct TableTraffic {
  uint32_t param_set = 0;
  std::string name;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

}  // namespace cpudist::client
