// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Coded keys: round trips of many kinds of key sets, their size, and strange bytes.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "wire/codec/keys.h"
#include "wire/codec/parts.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

std::vector<int64_t> distinct_keys(size_t count, uint64_t rows, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<int64_t> keys;
  while (keys.size() < count) {
    while (keys.size() < count) keys.push_back(static_cast<int64_t>(engine() % rows));
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  }
  return keys;
}

size_t check_round_trip(const std::vector<int64_t>& keys, const wire::KeyRange& range) {
  std::vector<uint8_t> bytes = {0xaa};  // what stands before is left alone
  wire::encode_keys(keys, range.open, &bytes);
  CHECK_EQ(bytes.front(), 0xaa);
  const size_t size = bytes.size() - 1;
  CHECK(size >= wire::coded_keys_bytes_min(keys.size()));
  bytes.insert(bytes.end(), 3, 0xff);  // and what comes behind is not read
  std::vector<int64_t> found(keys.size(), -1);
  CHECK_EQ(wire::decode_keys(std::span(bytes).subspan(1), range, found), size);
  CHECK(found == keys);
  return size;
}

uint32_t decode_code(std::vector<uint8_t> bytes, uint64_t rows, size_t count) {
  bytes.shrink_to_fit();  // the sanitizer guards its end
  std::vector<int64_t> keys(count);
  return error_code([&] {
    wire::decode_keys(bytes, {rows}, keys);
    if (!wire::increase(keys)) fail(__FILE__, __LINE__, "decoded keys do not increase");
    if (!keys.empty()) CHECK(static_cast<uint64_t>(keys.back()) < rows);
  });
}

}  // namespace

TEST(codec_keys_round_trip) {
  constexpr uint64_t kMost = uint64_t{1} << 62;
  check_round_trip({}, {5});
  check_round_trip({0}, {1});
  check_round_trip({static_cast<int64_t>(kMost - 1)}, {kMost});
  check_round_trip({0, static_cast<int64_t>(kMost - 1)}, {kMost});
  check_round_trip({5, 6, static_cast<int64_t>(kMost - 2), static_cast<int64_t>(kMost - 1)},
                   {kMost});
  for (const uint64_t rows : {uint64_t{2000}, uint64_t{100'000}, uint64_t{1} << 40, kMost}) {
    for (const size_t count : {1u, 2u, 127u, 128u, 129u, 1000u}) {
      check_round_trip(distinct_keys(count, rows, rows + count), {rows});
    }
  }
}

TEST(codec_keys_of_open_tables_round_trip) {
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
  constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();
  const wire::KeyRange all{.rows = 1, .open = true};
  check_round_trip({}, all);
  for (const int64_t key : {kLowest, int64_t{-1}, int64_t{0}, int64_t{1}, kHighest}) {
    check_round_trip({key}, all);
  }
  check_round_trip({kLowest, kHighest}, all);
  check_round_trip({kLowest, kLowest + 1, -1, 0, 1, kHighest - 1, kHighest}, all);
  std::mt19937_64 engine(11);
  for (const size_t count : {2u, 127u, 128u, 129u, 5000u}) {
    std::vector<int64_t> keys(count);
    for (int64_t& key : keys) key = static_cast<int64_t>(engine());
    std::sort(keys.begin(), keys.end());
    const double bits = 8.0 * static_cast<double>(check_round_trip(keys, all));
    if (count < 5000) continue;
    const double n = static_cast<double>(count);
    CHECK(bits / n <= 64 - std::log2(n) + 1.44 + 0.2);
  }
}

TEST(codec_keys_end_with_the_last_of_open_tables) {
  constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();
  // A key, and one that is to come behind the highest.
  std::vector<uint8_t> bytes;
  wire::encode_keys(std::vector<int64_t>{kHighest}, true, &bytes);
  bytes.resize(bytes.size() + 16, 0xff);
  std::vector<int64_t> keys(2);
  CHECK_EQ(error_code([&] { wire::decode_keys(bytes, {0, true}, keys); }),
           code(ErrorCode::kProtocol));
  CHECK_EQ(decode_code(bytes, 0, 1), code(ErrorCode::kProtocol));  // of a table without rows
}

TEST(codec_keys_of_a_dense_run_take_a_bit) {
  std::vector<int64_t> keys(100'000);
  std::iota(keys.begin(), keys.end(), 0);
  CHECK(check_round_trip(keys, {keys.size()}) <= keys.size() * 17 / 16 / 8);
  std::iota(keys.begin(), keys.end(), int64_t{1} << 61);
  CHECK(check_round_trip(keys, {uint64_t{1} << 62}) <= keys.size() * 17 / 16 / 8 + 1024);
}

TEST(codec_keys_are_near_their_entropy) {
  for (const uint64_t rows : {uint64_t{50'000}, uint64_t{1'000'000}, uint64_t{1} << 34,
                              uint64_t{1} << 54, (uint64_t{1} << 62) - 1}) {
    const auto keys = distinct_keys(20'000, rows, rows);
    const double n = static_cast<double>(keys.size());
    const double bits = 8.0 * static_cast<double>(check_round_trip(keys, {rows})) / n;
    CHECK(bits <= std::log2(static_cast<double>(rows) / n) + 1.44 + 0.2);
  }
}

TEST(codec_keys_of_mixed_density) {
  auto keys = distinct_keys(5000, 8000, 1);
  for (const int64_t key : distinct_keys(5000, uint64_t{1} << 50, 2)) {
    if (key > keys.back()) keys.push_back(key);
  }
  check_round_trip(keys, {uint64_t{1} << 50});
}

TEST(codec_keys_from_strangers) {
  std::mt19937 generator(3);
  const auto keys = distinct_keys(300, 100'000, 9);
  std::vector<uint8_t> bytes;
  wire::encode_keys(keys, false, &bytes);
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
    CHECK_EQ(decode_code(cut, 100'000, keys.size()), code(ErrorCode::kProtocol));
  }
  // One row fewer than the last key needs.
  CHECK_EQ(decode_code(bytes, static_cast<uint64_t>(keys.back()), keys.size()),
           code(ErrorCode::kProtocol));
  size_t refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<uint8_t> changed = bytes;
    changed[generator() % changed.size()] ^= static_cast<uint8_t>(1u << generator() % 8);
    if (round % 2 == 0) {
      for (uint8_t& byte : changed) byte = static_cast<uint8_t>(generator());
    }
    const uint32_t found = decode_code(changed, 100'000, keys.size());
    CHECK(found == 0 || found == code(ErrorCode::kProtocol));
    refused += found != 0;
  }
  CHECK(refused > 1000);
  CHECK_EQ(decode_code(std::vector<uint8_t>(50, 0), 100'000, 10), code(ErrorCode::kProtocol));
  CHECK_EQ(decode_code(std::vector<uint8_t>(50, 0xff), 100'000, 10), code(ErrorCode::kProtocol));
}

TEST(codec_sorts_keys_of_both_signs) {
  std::mt19937_64 engine(13);
  for (const size_t count : {10u, 2000u}) {
    std::vector<int64_t> keys(count);
    for (int64_t& key : keys) key = static_cast<int64_t>(engine());
    keys[0] = std::numeric_limits<int64_t>::min();
    keys[1] = std::numeric_limits<int64_t>::max();
    std::vector<int64_t> found;
    for (const uint32_t at : wire::order_of(keys)) found.push_back(keys[at]);
    std::sort(keys.begin(), keys.end());
    CHECK(found == keys);
  }
}

TEST(codec_sorts_keys) {
  for (const uint64_t rows : {uint64_t{3000}, uint64_t{1} << 62}) {
    for (const size_t count : {0u, 1u, 200u, 2000u}) {
      auto keys = distinct_keys(count, rows, count);
      const auto expected = keys;
      std::shuffle(keys.begin(), keys.end(), std::mt19937(5));
      std::vector<int64_t> found;
      for (const uint32_t at : wire::order_of(keys)) found.push_back(keys[at]);
      CHECK(found == expected);
      CHECK(wire::increase(found));
    }
  }
  CHECK(!wire::increase(std::vector<int64_t>{1, 1}));
}
