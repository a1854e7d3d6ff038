// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// What a trainer that steps by itself has of a remote table.

#include "client/geo/slots.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/check.h"

namespace geo_slots_test {

using cpudist::client::GeoSlots;
namespace kernels = cpudist::kernels;
using KeyList = std::vector<int64_t>;

constexpr uint32_t kDim = 3;
constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();

kernels::OptimizerConfig adagrad() {
  kernels::OptimizerConfig config;
  config.kind = kernels::OptimizerKind::kAdagrad;
  config.initial_accumulator = 0.5;
  return config;
}

// Rows of `key`, `key`, `key`.
void add(GeoSlots& slots, const KeyList& keys) {
  std::vector<float> rows;
  for (const int64_t key : keys) rows.insert(rows.end(), kDim, static_cast<float>(key));
  slots.add(keys, rows.data());
}

KeyList sorted_keys(GeoSlots& slots) {
  KeyList keys = slots.keys();
  std::sort(keys.begin(), keys.end());
  return keys;
}

TEST(geo_slots_begin_as_rows_without_an_update) {
  GeoSlots slots(kDim, adagrad(), true);
  CHECK(slots.find_trained(4) == nullptr && slots.find(4) == nullptr);
  add(slots, {4, -1, kLowest});
  CHECK_EQ(slots.size(), 3u);
  CHECK_EQ(slots.state_elements(), kDim);
  for (const int64_t key : slots.keys()) {
    const GeoSlots::Slot& slot = *slots.find(key);
    for (uint32_t i = 0; i < kDim; ++i) {
      CHECK_EQ(slots.find_trained(key)[i], static_cast<float>(key));
      CHECK_EQ(slots.shadow(slot)[i], static_cast<float>(key));
      CHECK_EQ(slots.state(slot)[i], 0.5f);
    }
    CHECK_EQ(slots.count(slot), 0u);
    CHECK_EQ(GeoSlots::touched(slot), 0u);
    CHECK(!slots.has_residue(slot));
  }
}

TEST(geo_slots_keep_what_is_written_while_others_come_and_go) {
  GeoSlots slots(kDim, adagrad(), true);
  const int64_t rows = 5000;  // several slabs
  for (int64_t key = 0; key < rows; ++key) {
    add(slots, {key});
    GeoSlots::Slot& slot = *slots.find(key);
    slots.set_count(slot, static_cast<uint32_t>(key) * 7);
    slots.state(slot)[1] = static_cast<float>(key) + 0.25f;
    GeoSlots::touch(slot, static_cast<uint32_t>(key % 5));
  }
  const auto is_old = [](const GeoSlots::Slot& slot) { return GeoSlots::touched(slot) < 3; };
  CHECK_EQ(slots.free_if(is_old), static_cast<uint64_t>(rows) * 3 / 5);
  CHECK_EQ(slots.free_if(is_old), 0u);
  for (int64_t key = 0; key < rows; ++key) {
    const GeoSlots::Slot* const slot = slots.find(key);
    CHECK_EQ(slot == nullptr, key % 5 < 3);
    if (slot == nullptr) continue;
    CHECK_EQ(slots.weight(*slot)[kDim - 1], static_cast<float>(key));
    CHECK_EQ(slots.count(*slot), static_cast<uint32_t>(key) * 7);
    CHECK_EQ(slots.state(*slot)[1], static_cast<float>(key) + 0.25f);
  }
  const uint64_t most = slots.memory_bytes();
  for (int64_t key = 0; key < rows; ++key) {
    if (key % 5 < 3) add(slots, {key});
  }
  CHECK_EQ(slots.size(), static_cast<uint64_t>(rows));
  CHECK(slots.memory_bytes() <= most * 2);
  CHECK_EQ(slots.count(*slots.find(0)), 0u);
}

TEST(geo_slots_with_a_residue_stay) {
  GeoSlots slots(kDim, adagrad(), true);
  add(slots, {1, 2, 3, 4});
  slots.weight(*slots.find(2))[1] += 0.5f;
  slots.weight(*slots.find(3))[1] = NAN;  // which the servers have, as far as they can
  CHECK_EQ(slots.free_if([](const GeoSlots::Slot& slot) { return slot.key < 4; }), 2u);
  CHECK(sorted_keys(slots) == (KeyList{2, 4}));
  slots.shadow(*slots.find(2))[1] += 0.5f;
  CHECK_EQ(slots.free_if([](const GeoSlots::Slot&) { return true; }), 2u);
  CHECK_EQ(slots.size(), 0u);
}

TEST(geo_slots_of_a_trainer_that_is_alone_have_no_shadow) {
  GeoSlots slots(kDim, kernels::OptimizerConfig{}, false);
  const GeoSlots with(kDim, kernels::OptimizerConfig{}, true);
  add(slots, {7});
  CHECK(slots.shadow(*slots.find(7)) == nullptr);
  CHECK_EQ(slots.state_elements(), 0u);
  CHECK_EQ(with.slot_bytes() - slots.slot_bytes(), kDim * sizeof(float));
  slots.weight(*slots.find(7))[0] = 9;
  CHECK_EQ(slots.free_if([](const GeoSlots::Slot&) { return true; }), 1u);
}

}  // namespace geo_slots_test
