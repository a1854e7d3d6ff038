// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How much memory a parameter set's remote tables may take in its trainer, and what that has cost.
#pragma once

#include <atomic>
#include <cstdint>

namespace cpudist::client {

// What one set may take. Nothing of static tables counts.
struct CacheLimits {
  static constexpr uint64_t kCacheBytes = 256ull << 20;
  static constexpr uint64_t kResidueBytes = 64ull << 20;
  uint64_t cache_bytes = kCacheBytes;      // of values of rows
  uint64_t residue_bytes = kResidueBytes;  // of what lossy pushes hold back of rows
};

// Thread safety: any thread.
struct CacheBudget {
  explicit CacheBudget(uint64_t bytes) : limit_bytes(bytes) {}
  const uint64_t limit_bytes;
  std::atomic<uint64_t> used_bytes{0};
  // Whose values went before their step did.
  std::atomic<uint64_t> dropped_rows{0};
};

}  // namespace cpudist::client
