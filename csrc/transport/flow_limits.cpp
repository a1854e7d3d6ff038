// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/flow_limits.h"

#include <unistd.h>

#include <algorithm>

namespace cpudist::transport {
namespace {

constexpr uint64_t kBudgetBytesMin = 256ull << 20;
constexpr uint64_t kBudgetBytesMax = 4096ull << 20;
constexpr uint64_t kPartOfMemory = 8;

}  // namespace

FlowLimits::FlowLimits() {
  const int64_t pages = sysconf(_SC_PHYS_PAGES);
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const bool known = pages > 0 && page_bytes > 0;
  const uint64_t memory =
      known ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(page_bytes) : 0;
  budget_bytes = std::clamp(memory / kPartOfMemory, kBudgetBytesMin, kBudgetBytesMax);
}

void FlowLimits::heed(std::chrono::milliseconds liveness) {
  slow = std::max<std::chrono::milliseconds>(2 * liveness, slow);
  patience = liveness / 4;
  stalled = liveness / 5;
}

}  // namespace cpudist::transport
