// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Memory of arrays of slots: where they lie, and what becomes of those that are freed.

#include "table/slot_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "support/check.h"

namespace cpudist::testing {
namespace {

constexpr size_t kKilobyte = 1024;
constexpr size_t kChunk = 2048 * kKilobyte;

bool is_zero(const void* memory, size_t size_bytes) {
  const auto* const bytes = static_cast<const uint8_t*>(memory);
  return std::all_of(bytes, bytes + size_bytes, [](uint8_t byte) { return byte == 0; });
}

}  // namespace

TEST(slot_memory_gives_zeroed_memory_that_nobody_else_has) {
  table::SlotMemory memory(4096);
  std::map<uint8_t*, size_t> taken;
  std::mt19937_64 random(7);
  for (int turn = 0; turn < 2000; ++turn) {
    if (!taken.empty() && random() % 3 == 0) {
      auto one = taken.begin();
      std::advance(one, random() % taken.size());
      memory.free(one->first, one->second);
      taken.erase(one);
      continue;
    }
    const size_t size_bytes = size_t{64} << random() % 16;  // to 2 MiB
    auto* const made = static_cast<uint8_t*>(memory.allocate(size_bytes));
    CHECK_EQ(reinterpret_cast<uintptr_t>(made) % 64, 0u);
    CHECK(is_zero(made, size_bytes));
    std::memset(made, 0xff, size_bytes);
    const auto after = taken.lower_bound(made);
    CHECK(after == taken.end() || made + size_bytes <= after->first);
    if (after != taken.begin()) {
      const auto before = std::prev(after);
      CHECK(before->first + before->second <= made);
    }
    taken.emplace(made, size_bytes);
  }
  for (const auto& [made, size_bytes] : taken) memory.free(made, size_bytes);
  // At most one chunk is kept.
  CHECK(memory.spare_bytes() <= kChunk);
}

TEST(slot_memory_puts_arrays_of_some_size_together) {
  table::SlotMemory memory(4096);
  std::vector<uint8_t*> made;
  for (int i = 0; i < 64; ++i) {
    made.push_back(static_cast<uint8_t*>(memory.allocate(32 * kKilobyte)));
  }
  const auto [low, high] = std::minmax_element(made.begin(), made.end());
  CHECK_EQ(static_cast<size_t>(*high - *low), kChunk - 32 * kKilobyte);
  CHECK_EQ(reinterpret_cast<uintptr_t>(*low) % kChunk, 0u);
  CHECK_EQ(memory.spare_bytes(), 0u);
  // Halves that are both free are one array of twice the size again, in the same chunk.
  for (uint8_t* one : made) memory.free(one, 32 * kKilobyte);
  CHECK_EQ(memory.spare_bytes(), kChunk);
  auto* const whole = static_cast<uint8_t*>(memory.allocate(kChunk));
  CHECK(whole == *low);
  CHECK_EQ(memory.spare_bytes(), 0u);
  memory.free(whole, kChunk);
}

TEST(slot_memory_of_few_arrays_takes_no_chunk) {
  table::SlotMemory memory(16);
  void* const made = memory.allocate(16 * kKilobyte);
  CHECK_EQ(memory.spare_bytes(), 0u);
  memory.free(made, 16 * kKilobyte);
  CHECK_EQ(memory.spare_bytes(), 0u);
  memory.free(nullptr, 0);
}

}  // namespace cpudist::testing
