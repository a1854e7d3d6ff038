// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The trainer's row cache: what a lookup asks for, and which rows a gradient may name.

#include "client/row_cache.h"

#include <vector>

#include "base/errors.h"
#include "kernels/hash.h"
#include "support/check.h"

namespace {

using cpudist::Error;
using cpudist::ErrorCode;
using namespace cpudist;  // NOLINT

std::vector<uint16_t> deal(uint32_t server_count) {
  std::vector<uint16_t> owners(cpudist::kernels::kBucketCount);
  for (size_t b = 0; b < owners.size(); ++b) owners[b] = static_cast<uint16_t>(b % server_count);
  return owners;
}

wire::TableSpec spec_of(uint64_t rows) { return wire::TableSpec{"words", rows, 4, 0}; }

std::vector<int64_t> missing(client::TableCache& cache, std::vector<int64_t> ids) {
  const auto found = cache.take_missing(std::span<const int64_t>(ids));
  return {found.begin(), found.end()};
}

ErrorCode code_thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  cpudist::testing::fail(__FILE__, __LINE__, "nothing was thrown");
}

TEST(client_rows_are_asked_for_once_a_step) {
  const auto owners = deal(2);
  client::TableCache cache(spec_of(10), 7, owners, 2);
  CHECK(missing(cache, {3, 1, 3, 9, 1}) == (std::vector<int64_t>{3, 1, 9}));
  CHECK(missing(cache, {9, 3, 2}) == (std::vector<int64_t>{2}));
  cache.invalidate();
  CHECK(missing(cache, {9}) == (std::vector<int64_t>{9}));
}

TEST(client_rows_read_without_a_lookup_are_stale_and_stay_unpulled) {
  const auto owners = deal(1);
  client::TableCache cache(spec_of(10), 7, owners, 1);
  missing(cache, {3});
  const std::vector<int64_t> keys{1, 3, 9};
  CHECK((cache.stale(keys, false) == std::vector<int64_t>{1, 9}));
  CHECK((cache.stale(keys, false) == std::vector<int64_t>{1, 9}));
  CHECK(cache.stale(keys, true) == keys);
  int64_t unique[1];
  uint32_t inverse[1];
  const std::vector<int64_t> read{9};
  CHECK(code_thrown_by([&] { cache.take_pulled(read, unique, inverse); }) ==
        ErrorCode::kUnpulledRow);
  CHECK((missing(cache, {9, 3}) == std::vector<int64_t>{9}));
  const std::vector<int64_t> outside{10};
  CHECK(code_thrown_by([&] { cache.stale(outside, false); }) == ErrorCode::kRowOutOfRange);
}

TEST(client_rows_accepts_int32_ids) {
  const auto owners = deal(1);
  client::TableCache cache(spec_of(10), 7, owners, 1);
  const std::vector<int32_t> ids{5, 5, 0};
  const auto found = cache.take_missing(std::span<const int32_t>(ids));
  CHECK((std::vector<int64_t>(found.begin(), found.end()) == std::vector<int64_t>{5, 0}));
}

TEST(client_rows_refuses_ids_outside_and_stamps_nothing) {
  const auto owners = deal(1);
  client::TableCache cache(spec_of(10), 7, owners, 1);
  CHECK_EQ(code_thrown_by([&] { missing(cache, {4, 10}); }), ErrorCode::kRowOutOfRange);
  CHECK_EQ(code_thrown_by([&] { missing(cache, {4, -1}); }), ErrorCode::kRowOutOfRange);
  CHECK(missing(cache, {4}) == (std::vector<int64_t>{4}));
}

TEST(client_rows_forgets_a_failed_pull) {
  const auto owners = deal(1);
  client::TableCache cache(spec_of(10), 7, owners, 1);
  const std::vector<int64_t> asked = missing(cache, {4, 5});
  cache.forget(asked);
  CHECK(missing(cache, {5}) == (std::vector<int64_t>{5}));
}

struct Taken {
  std::vector<int64_t> unique;
  std::vector<uint32_t> inverse;
};

Taken take(client::TableCache& cache, const std::vector<int64_t>& keys) {
  Taken taken{std::vector<int64_t>(keys.size()), std::vector<uint32_t>(keys.size())};
  taken.unique.resize(cache.take_pulled(keys, taken.unique.data(), taken.inverse.data()));
  return taken;
}

TEST(client_rows_gradients_need_a_pull_since_the_last_step) {
  const auto owners = deal(1);
  client::TableCache cache(spec_of(10), 7, owners, 1);
  const std::vector<int64_t> keys{2, 2, 3};
  CHECK_EQ(code_thrown_by([&] { take(cache, keys); }), ErrorCode::kUnpulledRow);
  missing(cache, {2, 3});
  take(cache, keys);
  cache.refresh();  // a second lookup outside of rounds
  missing(cache, {3});
  take(cache, keys);
  cache.invalidate();
  CHECK_EQ(code_thrown_by([&] { take(cache, keys); }), ErrorCode::kUnpulledRow);
  CHECK_EQ(code_thrown_by([&] { take(cache, {10}); }), ErrorCode::kRowOutOfRange);
  CHECK_EQ(code_thrown_by([&] { take(cache, {-1}); }), ErrorCode::kRowOutOfRange);
}

TEST(client_rows_deduplicates_gradients_by_first_appearance) {
  const auto owners = deal(1);
  client::TableCache cache(spec_of(10), 7, owners, 1);
  missing(cache, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  const Taken first = take(cache, {4, 0, 4, 9, 0});
  CHECK((first.unique == std::vector<int64_t>{4, 0, 9}));
  CHECK((first.inverse == std::vector<uint32_t>{0, 1, 0, 2, 1}));
  // Places of the first gradient are left in the marks: 9 stood where 7 stands now, 4 where 9 does.
  const Taken second = take(cache, {9, 8, 7, 9, 4, 7, 0});
  CHECK((second.unique == std::vector<int64_t>{9, 8, 7, 4, 0}));
  CHECK((second.inverse == std::vector<uint32_t>{0, 1, 2, 0, 3, 2, 4}));
  CHECK(take(cache, {}).unique.empty());
}

TEST(client_rows_split_gives_every_key_to_its_owner) {
  const auto owners = deal(3);
  const uint64_t salt = cpudist::kernels::table_salt("t");
  client::KeySplit split(owners, 3, salt);
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 1000; ++key) keys.push_back(key * 37);
  split.run(keys);
  size_t total = 0;
  for (uint32_t s = 0; s < 3; ++s) {
    for (const uint32_t position : split.positions(s)) {
      CHECK_EQ(owners[cpudist::kernels::bucket_of(keys[position], salt)], s);
    }
    CHECK(split.count(s) > 200);
    total += split.count(s);
  }
  CHECK_EQ(total, keys.size());
}

TEST(client_row_cache_that_is_released_holds_no_memory) {
  const auto owners = deal(2);
  client::TableCache cache(spec_of(100), 1, owners, 2);
  const std::vector<int64_t> keys{3, 7};
  CHECK_EQ(cache.memory_bytes(), 800u);
  CHECK_EQ(missing(cache, keys).size(), 2u);
  cache.release();
  CHECK_EQ(cache.memory_bytes(), 0u);
  CHECK_EQ(code_thrown_by([&] { missing(cache, keys); }), ErrorCode::kClosed);
  int64_t unique[2];
  uint32_t inverse[2];
  CHECK_EQ(code_thrown_by([&] { cache.take_pulled(keys, unique, inverse); }), ErrorCode::kClosed);
  std::vector<int64_t> all;
  const std::span<const int64_t> ids(keys);
  CHECK_EQ(code_thrown_by([&] { cache.take_coming(ids, true, &all, &all); }), ErrorCode::kClosed);
  // What was under way in other threads ends.
  cache.place(keys, nullptr);
  cache.overwrite(keys, nullptr);
  cache.keep(keys);
  cache.hold(keys);
  cache.await(keys);
  cache.drop(keys);
  cache.forget(keys);
  cache.unite(keys, &all);
  cache.give_up_wanted(ids);
  cache.invalidate();
  CHECK_EQ(cache.want(ids), 0u);
  CHECK(!cache.wants_any(keys));
}

}  // namespace
