// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a server counts while it works; ServerStats is what it tells of it.
#pragma once

#include <atomic>
#include <cstdint>

namespace cpudist::server {

// Thread safety: all members.
struct ServerCounters {
  std::atomic<uint64_t> rounds{0};
  std::atomic<uint64_t> pushes{0};
  std::atomic<uint64_t> duplicates{0};
  std::atomic<uint64_t> pending_bytes{0};
  std::atomic<uint64_t> refused{0};
};

}  // namespace cpudist::server
