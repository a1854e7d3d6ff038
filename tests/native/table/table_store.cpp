// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Row records, their index, dense blocks and the pool of update threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>

#include "server/update/pool.h"
#include "support/server_fixture.h"
#include "table/dense_block.h"
#include "table/row_index.h"
#include "table/table.h"

namespace cpudist::testing {
namespace {

kernels::OptimizerConfig adagrad() {
  kernels::OptimizerConfig config;
  config.kind = kernels::OptimizerKind::kAdagrad;
  config.lr = 0.1;
  config.initial_accumulator = 0.5;
  return config;
}

std::vector<int64_t> first_keys(size_t count) {
  std::vector<int64_t> keys(count);
  std::iota(keys.begin(), keys.end(), 0);
  return keys;
}

wire::TableRows rows_of(const std::vector<int64_t>& keys, const std::vector<float>& weights) {
  wire::TableRows rows;
  rows.keys = keys;
  rows.weights = weights;
  return rows;
}

template <typename Call>
std::string error_of(ErrorCode code, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK_EQ(error.code(), code);
    return error.what();
  }
  fail(__FILE__, __LINE__, "no error");
}

}  // namespace

TEST(row_index_finds_records_under_equal_hashes) {
  // More than a line of slots has room for, between others, through several growths.
  constexpr uint64_t kSame = 0x123456789abcdef0;
  constexpr uint32_t kRecords = 5000;
  table::RowIndex index(0);
  const auto hash_of = [](uint32_t record) {
    return record % 100 == 0 ? kSame : kernels::hash_of(record, 3);
  };
  for (uint32_t record = 0; record < kRecords; ++record) index.insert(hash_of(record), record);
  for (uint32_t record = 0; record < kRecords; ++record) {
    const auto is_it = [&](uint32_t other) { return other == record; };
    CHECK_EQ(index.find(hash_of(record), is_it), record);
  }
  CHECK_EQ(index.find(kSame, [](uint32_t) { return false; }), table::RowIndex::kNone);
  // Without a record of the tag zero, empty slots are none either.
  CHECK_EQ(index.guess(hash_of(1) & 0xffffffff), table::RowIndex::kNone);
}

TEST(row_index_finds_what_was_inserted) {
  constexpr uint64_t kSalt = 5;
  const auto hash_of = [](int64_t key) { return kernels::hash_of(key, kSalt); };
  for (const uint64_t rows : {uint64_t{0}, uint64_t{20000}, uint64_t{1} << 54}) {
    table::RowIndex index(rows);
    std::vector<int64_t> keys;
    const auto find = [&](int64_t key) {
      return index.find(hash_of(key), [&](uint32_t record) { return keys[record] == key; });
    };
    std::mt19937_64 random(1);
    while (keys.size() < 50000) {
      const auto key = static_cast<int64_t>(random());
      if (find(key) != table::RowIndex::kNone) continue;
      const auto record = static_cast<uint32_t>(keys.size());
      keys.push_back(key);
      index.insert(hash_of(key), record);
      CHECK_EQ(find(key), record);
    }
    for (size_t record = 0; record < keys.size(); ++record) {
      CHECK_EQ(find(keys[record]), static_cast<uint32_t>(record));
    }
    CHECK(index.size_bytes() >= 8 * keys.size());
    for (int i = 0; i < 1000; ++i) {
      CHECK_EQ(find(static_cast<int64_t>(random())), table::RowIndex::kNone);
    }
  }
}

TEST(row_index_tells_keys_of_one_tag_apart) {
  // One half of the hash is equal, and the bucket: only the records' keys differ.
  table::RowIndex index(10);
  std::vector<uint64_t> hashes;
  for (uint64_t i = 0; i < 300; ++i) hashes.push_back((uint64_t{7} << 32) | (i << 12) | 5);
  const auto find = [&](uint64_t hash) {
    return index.find(hash, [&](uint32_t record) { return hashes[record] == hash; });
  };
  for (uint32_t record = 0; record < hashes.size(); ++record) {
    CHECK_EQ(find(hashes[record]), table::RowIndex::kNone);
    index.insert(hashes[record], record);
  }
  for (uint32_t record = 0; record < hashes.size(); ++record) {
    CHECK_EQ(find(hashes[record]), record);
  }
  CHECK_EQ(index.guess(hashes[299]), 0u);
}

TEST(table_keeps_rows_over_many_slabs) {
  constexpr size_t kRows = 120000;
  table::Table table(0, wire::TableSpec{"t", kRows, 8, 0}, adagrad(), 0, 1);
  const auto keys = first_keys(kRows);
  std::vector<float> weights(kRows * 8);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i % 1000);
  table.store(rows_of(keys, weights));
  CHECK_EQ(table.row_count(), kRows);
  std::vector<float> gathered(weights.size());
  table.gather(keys, gathered.data());
  CHECK(gathered == weights);
  std::vector<uint32_t> records(kRows);
  std::vector<uint8_t> shards(kRows);
  table.find(keys, records.data(), shards.data());
  CHECK_EQ(std::set<uint32_t>(records.begin(), records.end()).size(), kRows);
  CHECK_EQ(std::set<uint8_t>(shards.begin(), shards.end()).size(), table::Table::kShards);
  for (size_t i = 0; i < kRows; i += 997) CHECK_EQ(table.header(records[i]).key, keys[i]);
}

TEST(table_rows_take_few_bytes_and_one_part_of_the_index_grows_at_a_time) {
  constexpr uint64_t kRecordBytes = 16 + 4 * 17 + 4;          // header, row, sum; in steps of 8
  constexpr uint64_t kRows = 2 * ((4 << 20) / kRecordBytes);  // two slabs, full
  // What moves when one part grows, of an index with a part for each 2,048 to 4,096 rows.
  constexpr uint64_t kMostMoved = 8 * 4096;
  kernels::OptimizerConfig config;
  config.kind = kernels::OptimizerKind::kRowWiseAdagrad;
  wire::TableSpec spec{"t", kRows, 16, 0};
  spec.remote = true;
  table::Table table(0, spec, config, 0, 1);
  CHECK_EQ(uint64_t{2} * table.rows_per_slab(), kRows);
  const uint64_t empty = table.size_bytes();
  const auto index_bytes = [&] {
    return table.size_bytes() - table.slab_count() * table.rows_per_slab() * kRecordBytes;
  };
  uint64_t before = index_bytes();
  uint64_t growths = 0;
  uint64_t most = 0;
  for (const int64_t key : first_keys(kRows)) {
    table.make_room({&key, 1});
    table.make(key);
    const uint64_t after = index_bytes();
    // A part's slots are doubled: as many move as there are more.
    most = std::max(most, after - before);
    growths += after > before;
    before = after;
  }
  CHECK_EQ(table.row_count(), kRows);
  CHECK_EQ(table.slab_count(), 2u);
  CHECK(growths > 100);
  CHECK(most > 0);
  CHECK(most <= kMostMoved);
  const double per_row = static_cast<double>(table.size_bytes() - empty) / kRows;
  CHECK(per_row >= kRecordBytes + 8);
  CHECK(per_row <= 105);
}

TEST(table_small_tables_are_small) {
  table::Table table(0, wire::TableSpec{"t", 10, 4, 0}, sgd(), 0, 1);
  const std::vector<int64_t> keys = {3};
  table.store(rows_of(keys, {1, 2, 3, 4}));
  CHECK(table.size_bytes() < 16384);
}

TEST(table_takes_few_bytes_a_row) {
  constexpr size_t kRows = 200000;
  kernels::OptimizerConfig config = adagrad();
  config.kind = kernels::OptimizerKind::kRowWiseAdagrad;
  table::Table table(0, wire::TableSpec{"t", kRows, 16, 0}, config, 0, 1);
  const auto keys = first_keys(kRows);
  table.store(rows_of(keys, std::vector<float>(kRows * 16)));
  // 88 of a record; the index is at least 35 % full.
  CHECK(table.size_bytes() < kRows * (88 + 8 * 100 / 35) + (8u << 20));
}

TEST(table_takes_the_last_of_equal_keys) {
  table::Table table(0, wire::TableSpec{"t", 10, 2, 0}, sgd(), 0, 1);
  const std::vector<int64_t> keys = {3, 4, 3};
  table.store(rows_of(keys, {1, 2, 3, 4, 5, 6}));
  CHECK_EQ(table.row_count(), 2u);
  std::vector<float> got(6);
  table.gather(keys, got.data());
  CHECK(got == std::vector<float>({5, 6, 3, 4, 5, 6}));
}

TEST(table_stores_state_counts_and_step) {
  table::Table table(0, wire::TableSpec{"t", 10, 2, 0}, adagrad(), 0, 1);
  const std::vector<int64_t> keys = {7, 2};
  const std::vector<float> weights = {1, 2, 3, 4};
  table.store(rows_of(keys, weights));
  std::vector<float> got(4), state(4);
  std::vector<uint32_t> counts(2);
  table.fetch(keys, got.data(), state.data(), counts.data());
  CHECK(state == std::vector<float>({0.5f, 0.5f, 0.5f, 0.5f}));
  CHECK(counts == std::vector<uint32_t>({0, 0}));

  const std::vector<float> new_state = {5, 6, 7, 8};
  const std::vector<uint32_t> new_counts = {11, 12};
  wire::TableRows rows = rows_of(keys, weights);
  rows.state = new_state;
  rows.counts = new_counts;
  rows.step = 13;
  table.store(rows);
  table.fetch(keys, got.data(), state.data(), counts.data());
  CHECK(got == weights);
  CHECK(state == new_state);
  CHECK(counts == new_counts);
  CHECK_EQ(table.step(), 13u);
  CHECK_EQ(table.row_count(), 2u);
}

TEST(table_refuses_rows_it_cannot_have) {
  table::Table table(0, wire::TableSpec{"emb", 64, 2, 0}, sgd(), 1, 2);
  const std::vector<float> weights = {1, 2};
  const auto store = [&](int64_t key) {
    const std::vector<int64_t> keys = {key};
    table.store(rows_of(keys, weights));
  };
  CHECK(contains(error_of(ErrorCode::kRowOutOfRange, [&] { store(64); }), "row 64"));
  CHECK(contains(error_of(ErrorCode::kRowOutOfRange, [&] { store(-1); }), "row -1"));
  int64_t foreign = 0;
  const auto owner = [](int64_t key) {
    return wire::owner_of_bucket(kernels::bucket_of(key, kernels::table_salt("emb")), 2);
  };
  while (owner(foreign) == 1) ++foreign;
  CHECK(contains(error_of(ErrorCode::kInvalidArgument, [&] { store(foreign); }), "server 0"));
  const std::vector<int64_t> unknown = {foreign};
  std::vector<float> out(2);
  const auto text =
      error_of(ErrorCode::kInvalidArgument, [&] { table.gather(unknown, out.data()); });
  CHECK(contains(text, "emb") && contains(text, "row " + std::to_string(foreign)));
  const std::vector<float> short_row = {1};
  error_of(ErrorCode::kInvalidArgument, [&] { table.store(rows_of(unknown, short_row)); });
  CHECK_EQ(table.row_count(), 0u);
}

TEST(row_index_has_room_that_was_reserved) {
  constexpr uint64_t kRows = 100000;
  constexpr uint64_t kSalt = 5;
  table::RowIndex index(3 * kRows);
  index.reserve(1000, 1365, kRows);
  const size_t reserved = index.size_bytes();
  std::vector<int64_t> keys;
  for (int64_t key = 0; keys.size() < kRows; ++key) {
    const uint32_t bucket = kernels::bucket_of(key, kSalt);
    if (bucket < 1000 || bucket >= 2365) continue;
    index.insert(kernels::hash_of(key, kSalt), static_cast<uint32_t>(keys.size()));
    keys.push_back(key);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto found = index.find(kernels::hash_of(keys[i], kSalt),
                                  [&](uint32_t record) { return keys[record] == keys[i]; });
    CHECK_EQ(found, static_cast<uint32_t>(i));
  }
  // A part that got more than its share has doubled, few have.
  CHECK(reserved > 8 * kRows);
  CHECK(index.size_bytes() < reserved + reserved / 2);
}

TEST(table_step_rule_follows_the_optimizer) {
  using kernels::OptimizerKind;
  kernels::OptimizerConfig config;
  for (const auto kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad,
                          OptimizerKind::kRowWiseAdagrad, OptimizerKind::kSparseAdam}) {
    config.kind = kind;
    CHECK(!counts_per_row(config));
  }
  for (const auto kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kRmsprop,
                          OptimizerKind::kFtrl}) {
    config.kind = kind;
    CHECK(counts_per_row(config));
  }
  config.kind = OptimizerKind::kSgd;
  config.momentum = 0.9;
  CHECK(counts_per_row(config));
  config.momentum = 0;
  config.weight_decay = 0.1;
  CHECK(counts_per_row(config));
}

TEST(table_dense_block_stores_and_updates) {
  wire::BlockSpec spec;
  spec.name = "b";
  spec.elements = 3;
  spec.dtype = wire::DType::kFloat64;
  table::DenseBlock block(0, spec, adagrad());
  CHECK(!block.stored());
  const std::vector<double> weights = {1, 2, 3};
  wire::BlockValues values;
  values.weights = {reinterpret_cast<const uint8_t*>(weights.data()), 24};
  values.step = 4;
  block.store(values);
  CHECK_EQ(block.state().size(), 24u);
  const std::vector<double> gradient = {1, 0, -1};
  block.update(adagrad(), gradient.data(), 0);
  CHECK_EQ(block.step(), 5u);
  double updated[3];
  std::memcpy(updated, block.weight().data(), 24);
  CHECK_NEAR(updated[0], 1 - 0.1 / std::sqrt(1.5), 1e-12);
  CHECK_EQ(updated[1], 2.0);
  values.weights = values.weights.subspan(8);
  error_of(ErrorCode::kInvalidArgument, [&] { block.store(values); });
}

TEST(table_update_pool_runs_every_task_once) {
  for (const uint32_t threads : {1u, 3u}) {
    server::UpdatePool pool(threads);
    for (int repeat = 0; repeat < 200; ++repeat) {
      std::vector<std::atomic<int>> runs(37);
      pool.run(runs.size(), [&](size_t i) { runs[i].fetch_add(1); });
      for (const auto& count : runs) CHECK_EQ(count.load(), 1);
    }
    CHECK_THROWS(pool.run(5,
                          [](size_t i) {
                            if (i == 3) throw std::runtime_error("x");
                          }),
                 std::runtime_error);
  }
}

TEST(table_update_pool_serves_two_callers) {
  server::UpdatePool pool(3);
  std::atomic<int> total{0};
  const auto call = [&] {
    for (int i = 0; i < 100; ++i) pool.run(10, [&](size_t) { total.fetch_add(1); });
  };
  std::thread other(call);
  call();
  other.join();
  CHECK_EQ(total.load(), 2000);
}

}  // namespace cpudist::testing
