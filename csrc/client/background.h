// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What sends for a parameter set beside the calls on it.
#pragma once

#include "client/stats.h"

namespace cpudist::client {

// Thread safety: all members.
class Background {
 public:
  virtual ~Background() = default;
  // Until everything handed to it is applied. Throws kInterrupted, kTimeout, and what it has failed
  // with.
  virtual void drain() = 0;
  // Ends it; what waits is dropped. Bounded once the session has failed or is idle.
  virtual void stop() = 0;
  virtual void add_stats(ClientStats* stats) const = 0;
};

}  // namespace cpudist::client
