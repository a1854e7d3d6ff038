// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Deduplication, segment sums, partition, gather, scatter and slicing against plain loops.

#include <algorithm>
#include <limits>
#include <set>
#include <unordered_map>

#include "kernels/dedupe.h"
#include "kernels/gather_scatter.h"
#include "kernels/hash.h"
#include "kernels/partition.h"
#include "kernels/slicing.h"
#include "support/kernels_common.h"

namespace cpudist::testing {
namespace {

using kernels::BlockSpan;
using kernels::KeyDeduper;

struct Deduped {
  std::vector<int64_t> unique;
  std::vector<uint32_t> inverse;
};

template <typename Key>
Deduped run_dedupe(KeyDeduper& deduper, const std::vector<Key>& keys) {
  Deduped result{std::vector<int64_t>(keys.size()), std::vector<uint32_t>(keys.size())};
  result.unique.resize(
      deduper.run(keys.data(), keys.size(), result.unique.data(), result.inverse.data()));
  return result;
}

template <typename Key>
Deduped reference_dedupe(const std::vector<Key>& keys) {
  Deduped result;
  std::unordered_map<int64_t, uint32_t> seen;
  for (Key key : keys) {
    const auto [at, is_new] = seen.emplace(key, static_cast<uint32_t>(result.unique.size()));
    if (is_new) result.unique.push_back(key);
    result.inverse.push_back(at->second);
  }
  return result;
}

TEST(kernels_dedupe_matches_a_hash_map) {
  KeyDeduper deduper;  // one object: large and small batches must not disturb each other
  for (int pass = 0; pass < 2; ++pass) {
    for (size_t n : kernel_sizes()) {
      for (int64_t limit : {int64_t{1}, int64_t{7}, int64_t{1000000}}) {
        const std::vector<int64_t> keys = random_keys(n, limit, n * 31 + pass);
        const Deduped found = run_dedupe(deduper, keys);
        const Deduped expected = reference_dedupe(keys);
        CHECK(found.unique == expected.unique);
        CHECK(found.inverse == expected.inverse);
        const std::vector<int32_t> narrow(keys.begin(), keys.end());
        CHECK(run_dedupe(deduper, narrow).inverse == expected.inverse);
      }
    }
  }
}

TEST(kernels_dedupe_takes_extreme_keys) {
  const int64_t least = std::numeric_limits<int64_t>::min();
  const int64_t most = std::numeric_limits<int64_t>::max();
  KeyDeduper deduper;
  const Deduped found = run_dedupe(deduper, std::vector<int64_t>{0, least, -1, most, least, 0});
  CHECK(found.unique == (std::vector<int64_t>{0, least, -1, most}));
  CHECK(found.inverse == (std::vector<uint32_t>{0, 1, 2, 3, 1, 0}));
  CHECK_THROWS(deduper.run(found.unique.data(), size_t{1} << 31, nullptr, nullptr),
               std::length_error);
}

template <typename T>
void check_segment_sums() {
  KeyDeduper deduper;
  for (size_t n : {size_t{0}, size_t{1}, size_t{300}}) {
    const std::vector<int64_t> keys = random_keys(n, 40, n + 3);
    const Deduped deduped = run_dedupe(deduper, keys);
    const size_t count = deduped.unique.size();
    for (size_t dim : kernel_sizes()) {
      if (dim > 429) continue;
      const size_t stride = dim + 3;
      const std::vector<T> rows = random_values<T>(n * stride, dim);
      std::vector<T> expected(count * dim, T(0));
      for (size_t i = 0; i < n; ++i) {
        for (size_t d = 0; d < dim; ++d) {
          expected[deduped.inverse[i] * dim + d] += rows[i * stride + d];
        }
      }
      check_levels_agree("segment_sum dim=" + std::to_string(dim), [&] {
        std::vector<T> out(count * dim, T(-1));
        kernels::segment_sum(rows.data(), stride, n, dim, deduped.inverse.data(), out.data());
        CHECK(out == expected);
        std::vector<T> reversed(count * dim, T(-1));
        std::vector<T*> destinations(count);
        for (size_t u = 0; u < count; ++u) {
          destinations[u] = reversed.data() + (count - 1 - u) * dim;
        }
        kernels::segment_sum_to(rows.data(), stride, n, dim, deduped.inverse.data(),
                                destinations.data());
        for (size_t u = 0; u < count; ++u) {
          CHECK(std::equal(destinations[u], destinations[u] + dim, expected.data() + u * dim));
        }
        return out;
      });
      const std::vector<int64_t> inverse(deduped.inverse.begin(), deduped.inverse.end());
      check_levels_agree("segment_sum_any dim=" + std::to_string(dim), [&] {
        std::vector<T> out((count + 1) * dim, T(-1));
        kernels::segment_sum_any(rows.data(), stride, n, dim, inverse.data(), count + 1,
                                 out.data());
        CHECK(std::equal(expected.begin(), expected.end(), out.begin()));
        CHECK(std::all_of(out.begin() + static_cast<std::ptrdiff_t>(count * dim), out.end(),
                          [](T value) { return value == T(0); }));
        return out;
      });
    }
  }
}

TEST(kernels_segment_sum_float) { check_segment_sums<float>(); }
TEST(kernels_segment_sum_double) { check_segment_sums<double>(); }

TEST(kernels_hash_spreads_keys_and_tables) {
  std::vector<int> hits(kernels::kBucketCount, 0);
  const uint64_t salt = kernels::table_salt("emb.weight");
  for (int64_t key = 0; key < 409600; ++key) ++hits[kernels::bucket_of(key, salt)];
  // 100 expected per bucket, standard deviation 10
  CHECK(*std::max_element(hits.begin(), hits.end()) < 160);
  CHECK(*std::min_element(hits.begin(), hits.end()) > 50);
  std::set<uint64_t> salts;
  for (int set = 0; set < 8; ++set) {
    for (int table = 0; table < 64; ++table) {
      salts.insert(kernels::table_salt(std::to_string(set) + "." + std::to_string(table)));
    }
  }
  CHECK_EQ(salts.size(), 8u * 64u);
}

TEST(kernels_hash_values_are_fixed) {
  // Where rows live is part of the wire contract: these values must never change.
  CHECK_EQ(kernels::mix64(0), 0u);
  CHECK_EQ(kernels::mix64(1), 0x5692161d100b05e5u);
  CHECK_EQ(kernels::table_salt(""), kernels::mix64(0xcbf29ce484222325u));
  CHECK_EQ(kernels::table_salt("emb.weight"), 14996254750248837066u);
}

TEST(kernels_partition_is_a_stable_grouping) {
  kernels::KeyPartitioner partitioner;
  for (size_t parts : {size_t{1}, size_t{3}, size_t{20}}) {
    std::vector<uint16_t> owners(kernels::kBucketCount);
    for (size_t b = 0; b < owners.size(); ++b) owners[b] = static_cast<uint16_t>(b % parts);
    for (size_t n : kernel_sizes()) {
      const std::vector<int64_t> keys = random_keys(n, 1 << 30, n);
      std::vector<uint32_t> order(n);
      std::vector<uint32_t> offsets(parts + 1);
      const uint64_t salt = kernels::table_salt("t");
      partitioner.run(keys.data(), n, salt, owners.data(), parts, order.data(), offsets.data());
      std::vector<uint32_t> expected;
      for (size_t part = 0; part < parts; ++part) {
        CHECK_EQ(offsets[part], expected.size());
        for (size_t i = 0; i < n; ++i) {
          if (owners[kernels::bucket_of(keys[i], salt)] == part) {
            expected.push_back(static_cast<uint32_t>(i));
          }
        }
      }
      CHECK_EQ(offsets[parts], n);
      CHECK(order == expected);
    }
  }
}

TEST(kernels_gather_and_scatter_move_rows) {
  for (size_t dim : {size_t{0}, size_t{1}, size_t{4}, size_t{7}, size_t{8}, size_t{16}, size_t{32},
                     size_t{100}}) {
    for (size_t n : {size_t{0}, size_t{1}, size_t{50}}) {
      const size_t rows = 60;
      const size_t stride = dim + 1;
      const std::vector<float> table = random_values<float>(rows * stride, dim);
      std::vector<int64_t> index(rows);
      for (size_t i = 0; i < rows; ++i) index[i] = static_cast<int64_t>((i * 37) % rows);
      const std::vector<uint32_t> narrow(index.begin(), index.end());
      const size_t bytes = dim * sizeof(float);
      std::vector<float> out(n * dim);
      std::vector<float> pointed(n * dim);
      std::vector<const void*> pointers;
      for (size_t i = 0; i < n; ++i) pointers.push_back(table.data() + narrow[i] * stride);
      kernels::gather_rows(table.data(), stride * 4, index.data(), n, bytes, out.data(), bytes);
      kernels::gather_pointers(pointers.data(), n, bytes, pointed.data(), bytes);
      CHECK(out == pointed);
      std::vector<float> target(rows * stride, -1.0f);
      kernels::scatter_rows(target.data(), stride * 4, narrow.data(), n, bytes, out.data(), bytes);
      std::vector<float> expected(rows * stride, -1.0f);
      for (size_t i = 0; i < n; ++i) {
        for (size_t d = 0; d < dim; ++d) {
          CHECK_EQ(out[i * dim + d], table[narrow[i] * stride + d]);
          expected[narrow[i] * stride + d] = table[narrow[i] * stride + d];
        }
      }
      CHECK(target == expected);
    }
  }
}

TEST(kernels_find_out_of_range_names_the_first) {
  std::vector<int64_t> index(1000, 5);
  CHECK_EQ(kernels::find_out_of_range(index.data(), index.size(), 6), 1000u);
  CHECK_EQ(kernels::find_out_of_range(index.data(), index.size(), 5), 0u);
  CHECK_EQ(kernels::find_out_of_range(index.data(), 0, 0), 0u);
  index[700] = -1;
  index[900] = 6;
  CHECK_EQ(kernels::find_out_of_range(index.data(), index.size(), 6), 700u);
}

std::vector<int64_t> sizes_of(const std::vector<BlockSpan>& blocks) {
  std::vector<int64_t> sizes;
  for (const BlockSpan& block : blocks) sizes.push_back(block.size);
  return sizes;
}

TEST(kernels_slicing_follows_the_rule) {
  using Sizes = std::vector<int64_t>;
  CHECK(sizes_of(kernels::slice_parameter(0, 1, 3, 8192, true)).empty());
  CHECK(sizes_of(kernels::slice_parameter(8191, 1, 3, 8192, true)) == Sizes{8191});
  CHECK(sizes_of(kernels::slice_parameter(16384, 1, 3, 8192, true)) == (Sizes{8192, 8192}));
  CHECK(sizes_of(kernels::slice_parameter(100000, 1, 3, 8192, true)) ==
        (Sizes{33334, 33334, 33332}));
  CHECK(sizes_of(kernels::slice_parameter(100000, 1, 3, 8192, false)) == Sizes{100000});
  // 429 x 400: ceil(171600 / 4) = 42900, up to 108 whole rows of 400
  CHECK(sizes_of(kernels::slice_parameter(171600, 400, 4, 8192, true)) ==
        (Sizes{43200, 43200, 43200, 42000}));
  // whole rows may leave fewer blocks than servers
  CHECK(sizes_of(kernels::slice_parameter(30000, 10000, 2, 8192, true)) == (Sizes{20000, 10000}));
  CHECK(sizes_of(kernels::slice_parameter(40000, 20000, 4, 8192, true)) == (Sizes{20000, 20000}));
}

TEST(kernels_slicing_covers_every_element_once) {
  for (int64_t width : {1, 3, 64}) {
    for (int64_t rows : {1, 5, 1000}) {
      for (int64_t servers : {1, 2, 7, 5000}) {
        const auto blocks = kernels::slice_parameter(rows * width, width, servers, 16, true);
        CHECK(static_cast<int64_t>(blocks.size()) <= servers);
        int64_t next = 0;
        for (const BlockSpan& block : blocks) {
          CHECK_EQ(block.begin, next);
          CHECK(block.size > 0 && block.size % width == 0);
          next += block.size;
        }
        CHECK_EQ(next, rows * width);
      }
    }
  }
  const int64_t most = std::numeric_limits<int64_t>::max();
  CHECK_EQ(kernels::slice_parameter(most, most - 1, 2, 1, true).size(), 2u);
  CHECK_EQ(kernels::slice_parameter(most, most / 2 + 1, 1, 1, true).size(), 1u);
  CHECK_THROWS(kernels::slice_parameter(-1, 1, 1, 1, true), std::invalid_argument);
  CHECK_THROWS(kernels::slice_parameter(1, 0, 1, 1, true), std::invalid_argument);
  CHECK_THROWS(kernels::slice_parameter(1, 1, 0, 1, true), std::invalid_argument);
  CHECK_THROWS(kernels::slice_parameter(1, 1, 1, 0, true), std::invalid_argument);
}

}  // namespace
}  // namespace cpudist::testing
