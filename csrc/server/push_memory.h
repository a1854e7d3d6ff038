// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The memory that received pushes may take on a server, from their header to their update.
#pragma once

#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "server/counters.h"
#include "server/options.h"

namespace cpudist::server {

inline constexpr size_t kPoolBytes = size_t{256} << 20;

// Thread safety: all members.
class PushMemory {
 public:
  PushMemory(const ServerOptions& options, const ServerCounters& counters);

  bool limited() const { return cap_bytes_ != 0; }
  // Memory for a push, or nothing where there is no room; `waiting_bytes` wait for it besides those
  // of the pushes that are there.
  Buffer take(uint64_t size_bytes, uint64_t waiting_bytes = 0) const;
  // Whether a push may wait beside those that do.
  bool fits(uint64_t size_bytes) const;
  bool ever_fits(uint64_t size_bytes) const { return !limited() || size_bytes <= cap_bytes_; }
  // Throws kOverloaded, or kInvalidArgument for a push that would be sent again for ever.
  [[noreturn]] void refuse(uint64_t size_bytes, bool sent_again) const;

 private:
  const uint64_t cap_bytes_;
  const uint32_t shard_id_;
  const ServerCounters& counters_;
  const std::shared_ptr<MemoryCap> held_;
  const std::shared_ptr<BufferPool> pool_;
};

}  // namespace cpudist::server
