// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// A table that its trainer updates by itself: touched rows, shadows and updates.

#include "client/geo/table.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "base/errors.h"
#include "kernels/hash.h"
#include "support/check.h"

namespace cpudist::testing {
namespace {

using namespace cpudist;  // NOLINT

constexpr uint64_t kSalt = 7;
constexpr size_t kDim = 3;

// A table under SGD, with its weights: row k is k, k, k.
struct Fixture {
  std::vector<uint16_t> owners;
  std::vector<float> weight;
  std::vector<uint32_t> counts;
  client::GeoTable table;
  int64_t steps = 0;

  explicit Fixture(uint64_t rows, uint32_t servers = 1, bool tracks = true)
      : owners(deal(servers)),
        weight(rows * kDim),
        counts(rows),
        table(wire::TableSpec{"words", rows, kDim, 0}, kSalt, owners, servers, tracks) {
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i / kDim);
  }
  static std::vector<uint16_t> deal(uint32_t servers) {
    std::vector<uint16_t> owners(kernels::kBucketCount);
    for (size_t b = 0; b < owners.size(); ++b) owners[b] = static_cast<uint16_t>(b % servers);
    return owners;
  }
  // Takes 1 from each of these rows, once for every time it stands there.
  uint64_t step(const std::vector<int64_t>& keys) {
    kernels::OptimizerConfig config;
    config.lr = 1.0;
    const std::vector<float> ones(keys.size() * kDim, 1.0f);
    const client::LocalRows rows{weight.data(), nullptr, counts.data()};
    return table.update(rows, config, ++steps, keys, ones.data());
  }
  float first_of(int64_t key) const { return weight[static_cast<size_t>(key) * kDim]; }
};

std::vector<int64_t> sorted(std::vector<int64_t> keys) {
  std::sort(keys.begin(), keys.end());
  return keys;
}

using KeyList = std::vector<int64_t>;

std::vector<KeyList> take_touched(client::GeoTable& table) {
  auto taken = table.touched();
  table.next_interval();
  return taken;
}

}  // namespace

TEST(geo_table_sums_repeated_rows) {
  Fixture f(10);
  CHECK_EQ(f.step({4, 2, 4, 4}), 2u);
  CHECK_EQ(f.first_of(4), 1.0f);
  CHECK_EQ(f.first_of(2), 1.0f);
  CHECK(f.counts[4] == 1 && f.counts[2] == 1 && f.counts[3] == 0);
  CHECK_EQ(f.step({}), 0u);
  CHECK_EQ(f.step({2}), 1u);
  CHECK_EQ(f.counts[2], 2u);
}

TEST(geo_table_shadow_is_the_row_before_its_first_touch) {
  Fixture f(10);
  CHECK(f.table.shadow(4) == nullptr);
  f.step({4, 4});
  f.step({4, 9});
  CHECK_EQ(f.table.shadow_rows(), 2u);
  CHECK_EQ(f.table.shadow(4)[0], 4.0f);
  CHECK_EQ(f.table.shadow(4)[kDim - 1], 4.0f);
  CHECK_EQ(f.table.shadow(9)[0], 9.0f);
  CHECK(f.table.shadow(0) == nullptr);
  CHECK(f.table.shadowed() == (std::vector<KeyList>{{4, 9}}));
}

TEST(geo_table_touched_rows_are_taken_once_an_interval) {
  Fixture f(100, 3);
  f.step({50, 1, 50});
  f.step({1, 99});
  const auto taken = take_touched(f.table);
  CHECK_EQ(taken.size(), 3u);
  KeyList all;
  for (uint32_t server = 0; server < 3; ++server) {
    for (const int64_t key : taken[server]) {
      CHECK_EQ(f.owners[kernels::bucket_of(key, kSalt)], server);
      all.push_back(key);
    }
  }
  CHECK(sorted(all) == (KeyList{1, 50, 99}));
  for (const KeyList& keys : take_touched(f.table)) CHECK(keys.empty());
  f.step({1});
  size_t count = 0;
  for (const KeyList& keys : take_touched(f.table)) count += keys.size();
  CHECK_EQ(count, 1u);
  CHECK_EQ(f.table.shadow_rows(), 3u);
}

TEST(geo_table_refuses_keys_outside_before_it_changes_anything) {
  Fixture f(10);
  const std::vector<float> before = f.weight;
  for (const int64_t wrong : {int64_t{10}, int64_t{-1}, std::numeric_limits<int64_t>::max()}) {
    bool thrown = false;
    try {
      f.step({1, wrong});
    } catch (const Error& error) {
      thrown = error.code() == ErrorCode::kRowOutOfRange;
    }
    CHECK(thrown);
  }
  CHECK(f.weight == before);
  CHECK_EQ(f.table.shadow_rows(), 0u);
  CHECK(take_touched(f.table)[0].empty());
}

TEST(geo_table_that_tracks_nothing_keeps_no_shadow) {
  Fixture f(10, 1, false);
  const uint64_t before = f.table.size_bytes();
  f.step({4, 5});
  CHECK_EQ(f.table.shadow_rows(), 0u);
  CHECK_EQ(f.table.size_bytes(), before);
  CHECK(take_touched(f.table)[0].empty());
  CHECK_EQ(f.first_of(4), 3.0f);
}

TEST(geo_table_shadows_fill_slabs_and_are_forgotten) {
  const int64_t rows = 10000;  // two slabs and a part
  Fixture f(rows);
  const uint64_t empty = f.table.size_bytes();
  KeyList keys(rows);
  for (int64_t k = 0; k < rows; ++k) keys[static_cast<size_t>(k)] = rows - 1 - k;
  f.step(keys);
  f.step(keys);
  CHECK_EQ(f.table.shadow_rows(), static_cast<uint64_t>(rows));
  CHECK_EQ(f.table.size_bytes() - empty, rows * kDim * sizeof(float));
  for (int64_t k = 0; k < rows; ++k) CHECK_EQ(f.table.shadow(k)[1], static_cast<float>(k));
  f.table.forget_shadows();
  CHECK_EQ(f.table.size_bytes(), empty);
  CHECK(f.table.shadow(3) == nullptr && f.table.shadowed()[0].empty());
  CHECK(take_touched(f.table)[0].empty());
  f.step({3});
  CHECK_EQ(f.table.shadow(3)[0], 1.0f);  // two steps were taken from it
  CHECK(take_touched(f.table)[0] == (KeyList{3}));
}

}  // namespace cpudist::testing
