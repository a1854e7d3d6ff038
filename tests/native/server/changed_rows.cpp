// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Which rows a trainer has not been told of.

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "server/geo/changed_rows.h"
#include "support/check.h"

namespace cpudist::testing {
namespace {

using server::ChangedRows;

struct Taken {
  std::vector<uint32_t> records;
  bool more = false;
};

Taken take(server::ChangedRows& rows, uint32_t rank, uint32_t table = 0, uint64_t limit = 1000) {
  Taken taken;
  taken.records = rows.take(rank, table, limit, &taken.more);
  return taken;
}

void mark(server::ChangedRows& rows, uint32_t rank, std::vector<int32_t> records,
          uint32_t table = 0) {
  rows.mark(rank, table, records);
}

using Records = std::vector<uint32_t>;

}  // namespace

TEST(geo_changed_rows_are_told_to_all_others_once) {
  server::ChangedRows rows(2);
  for (uint32_t rank = 0; rank < 3; ++rank) rows.follow(rank);
  mark(rows, 0, {5, 64, 5, 0});
  mark(rows, 1, {64, 700});
  mark(rows, 1, {1}, 1);
  CHECK(take(rows, 0).records == (Records{64, 700}));
  CHECK(take(rows, 0).records.empty());
  CHECK(take(rows, 0, 1).records == (Records{1}));
  CHECK(take(rows, 1).records == (Records{0, 5, 64}));
  CHECK(take(rows, 1, 1).records.empty());
  CHECK(take(rows, 2).records == (Records{0, 5, 64, 700}));
  mark(rows, 2, {5});
  CHECK(take(rows, 0).records == (Records{5}));
  CHECK(!take(rows, 0).more);
}

TEST(geo_changed_rows_above_the_limit_stay) {
  server::ChangedRows rows(1);
  rows.follow(0);
  mark(rows, 1, {9, 3, 200, 64, 63});
  const Taken first = take(rows, 0, 0, 2);
  CHECK(first.more && first.records == (Records{3, 9}));
  mark(rows, 1, {3});
  const Taken second = take(rows, 0, 0, 3);
  CHECK(second.more && second.records == (Records{3, 63, 64}));
  const Taken third = take(rows, 0, 0, 1);
  CHECK(!third.more && third.records == (Records{200}));
  mark(rows, 1, {4});
  CHECK(take(rows, 0, 0, 0).more);  // no room is no loss
  CHECK(take(rows, 0).records == (Records{4}));
}

TEST(geo_changed_rows_of_who_is_not_followed_cost_nothing) {
  server::ChangedRows rows(1);
  mark(rows, 0, {1000000});
  CHECK_EQ(rows.size_bytes(), 0u);
  CHECK(take(rows, 7).records.empty() && !take(rows, 7).more);
  rows.follow(0);
  mark(rows, 1, {64000});
  CHECK(rows.size_bytes() >= 8000 && rows.size_bytes() < 20000);
  rows.follow(0);  // comes back with all values
  CHECK(take(rows, 0).records.empty());
  mark(rows, 1, {1});
  rows.forget(0);
  CHECK_EQ(rows.size_bytes(), 0u);
  CHECK(take(rows, 0).records.empty());
}

TEST(geo_changed_rows_equal_sets) {
  std::mt19937 generator(3);
  server::ChangedRows rows(1);
  std::vector<std::set<uint32_t>> expected(4);
  for (uint32_t rank = 0; rank < 4; ++rank) rows.follow(rank);
  for (int i = 0; i < 3000; ++i) {
    const uint32_t rank = generator() % 4;
    std::vector<int32_t> records(generator() % 5);
    for (int32_t& record : records) record = static_cast<int32_t>(generator() % 300);
    mark(rows, rank, records);
    for (uint32_t other = 0; other < 4; ++other) {
      if (other != rank) expected[other].insert(records.begin(), records.end());
    }
    const uint64_t limit = generator() % 20;
    const Taken taken = take(rows, rank, 0, limit);
    CHECK_EQ(taken.records.size(), std::min<size_t>(limit, expected[rank].size()));
    CHECK_EQ(taken.more, taken.records.size() < expected[rank].size());
    for (const uint32_t record : taken.records) CHECK_EQ(expected[rank].erase(record), 1u);
  }
}

}  // namespace cpudist::testing
