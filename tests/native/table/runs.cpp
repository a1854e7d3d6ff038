// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Runs of keys in a table, against lists of the same keys.

#include <algorithm>
#include <deque>
#include <set>
#include <string>
#include <vector>

#include "support/server_fixture.h"
#include "table/table.h"

namespace cpudist::testing {
namespace {

constexpr uint64_t kRunRows = 5000;
constexpr uint32_t kRunDim = 3;
constexpr uint32_t kRunServers = 3;

kernels::OptimizerConfig run_adagrad() {
  kernels::OptimizerConfig config;
  config.kind = kernels::OptimizerKind::kAdagrad;
  config.initial_accumulator = 0.5;
  return config;
}

table::Table table_of(uint32_t shard) {
  return table::Table(0, wire::TableSpec{"words", kRunRows, kRunDim, 0}, run_adagrad(), shard,
                      kRunServers);
}

std::vector<int64_t> owned_keys(uint32_t shard, uint64_t begin, uint64_t end) {
  std::vector<int64_t> keys;
  for (auto key = static_cast<int64_t>(begin); key < static_cast<int64_t>(end); ++key) {
    const uint32_t bucket = kernels::bucket_of(key, kernels::table_salt("words"));
    if (wire::owner_of_bucket(bucket, kRunServers) == shard) keys.push_back(key);
  }
  return keys;
}

// Element j of row i of what belongs to the keys.
std::vector<float> numbers(const std::vector<int64_t>& keys, float scale) {
  std::vector<float> values;
  for (const int64_t key : keys) {
    for (uint32_t j = 0; j < kRunDim; ++j) {
      values.push_back(scale * static_cast<float>(key * kRunDim + j));
    }
  }
  return values;
}

struct RunRows {
  std::vector<float> weights;
  std::vector<float> state;
  std::vector<uint32_t> counts;
  bool operator==(const RunRows&) const = default;
};

RunRows fetched(const table::Table& table, const std::vector<int64_t>& keys) {
  RunRows rows{std::vector<float>(keys.size() * kRunDim), std::vector<float>(keys.size() * kRunDim),
               std::vector<uint32_t>(keys.size())};
  table.fetch(keys, rows.weights.data(), rows.state.data(), rows.counts.data());
  return rows;
}

wire::RunView run_of(uint64_t begin, uint64_t end, const std::vector<int64_t>& keys,
                     const std::vector<float>& weights) {
  wire::RunView run;
  run.ref.begin = begin;
  run.ref.end = end;
  run.ref.dim = kRunDim;
  run.ref.rows = keys.size();
  run.weights = weights;
  return run;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return {};
}

}  // namespace

TEST(table_runs_store_what_lists_of_their_keys_do) {
  for (uint32_t shard = 0; shard < kRunServers; ++shard) {
    const auto keys = owned_keys(shard, 0, kRunRows);
    const auto weights = numbers(keys, 1);
    const auto state = numbers(keys, 0.5f);
    std::vector<uint32_t> counts(keys.size());
    for (size_t i = 0; i < counts.size(); ++i) counts[i] = static_cast<uint32_t>(i);
    table::Table lists = table_of(shard);
    table::Table runs = table_of(shard);
    wire::TableRows rows;
    rows.keys = keys;
    rows.weights = weights;
    wire::RunView run = run_of(0, kRunRows, keys, weights);
    const auto check = [&] {
      lists.store(rows);
      runs.store(run);
      CHECK(fetched(runs, keys) == fetched(lists, keys));
      CHECK_EQ(runs.row_count(), keys.size());
      CHECK_EQ(runs.step(), lists.step());
    };
    check();
    rows.state = state;
    rows.counts = counts;
    rows.step = 7;
    run.state = state;
    run.ref.state_elements = kRunDim;
    run.counts = counts;
    run.ref.counts = true;
    run.ref.step = 7;
    check();
    // Without state and counts the rows begin anew.
    rows = {.table = 0, .step = 8, .keys = keys, .weights = state, .state = {}, .counts = {}};
    run = run_of(0, kRunRows, keys, state);
    run.ref.step = 8;
    check();
  }
}

TEST(table_runs_are_fetched_in_the_order_of_their_keys) {
  table::Table table = table_of(1);
  const auto keys = owned_keys(1, 0, kRunRows);
  const auto weights = numbers(keys, 2);
  table.store(run_of(0, kRunRows, keys, weights));
  const auto some = owned_keys(1, 1234, 2345);
  CHECK_EQ(table.owned_rows(1234, 2345), some.size());
  RunRows rows{std::vector<float>(some.size() * kRunDim), std::vector<float>(some.size() * kRunDim),
               std::vector<uint32_t>(some.size())};
  table.fetch(wire::FetchRun{0, 1234, 2345}, rows.weights.data(), rows.state.data(),
              rows.counts.data());
  CHECK(rows == fetched(table, some));
}

TEST(table_rows_that_are_alike_need_one_row_of_weights) {
  table::Table table = table_of(2);
  const auto keys = owned_keys(2, 10, 3000);
  const std::vector<float> row = {1, -2, 3};
  wire::RunView run = run_of(10, 3000, keys, row);
  run.ref.alike = true;
  table.store(run);
  CHECK_EQ(table.row_count(), keys.size());
  std::vector<float> got(keys.size() * kRunDim);
  table.gather(keys, got.data());
  for (size_t i = 0; i < got.size(); ++i) CHECK_EQ(got[i], row[i % kRunDim]);
}

TEST(table_refuses_runs_that_do_not_fit_before_it_stores_a_row) {
  table::Table table = table_of(0);
  const auto keys = owned_keys(0, 0, 100);
  const auto weights = numbers(keys, 1);
  wire::RunView run = run_of(0, 100, keys, weights);
  run.ref.rows -= 1;
  const auto text = refusal([&] { table.store(run); });
  CHECK(contains(text, "words") && contains(text, "owns " + std::to_string(keys.size())));
  run.ref.rows += 1;
  run.ref.state_elements = kRunDim + 1;
  CHECK(contains(refusal([&] { table.store(run); }), "elements of state"));
  CHECK_EQ(table.row_count(), 0u);
  std::vector<float> out(keys.size() * kRunDim);
  std::vector<uint32_t> counts(keys.size());
  const auto unknown = refusal(
      [&] { table.fetch(wire::FetchRun{0, 0, 100}, out.data(), out.data(), counts.data()); });
  CHECK(contains(unknown, "never stored"));
}

TEST(table_with_memory_made_ahead_has_the_same_rows) {
  constexpr uint64_t kMany = 200000;
  const auto ahead = std::make_shared<table::MemoryAhead>();
  const wire::TableSpec spec{"words", kMany, 16, 0};
  table::Table table(0, spec, sgd(), 0, 1, {}, ahead);
  std::vector<float> weights(16 * 1000);
  for (uint64_t begin = 0; begin < kMany; begin += 1000) {
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(begin + i / 16);
    wire::RunView run;
    run.ref = {.dim = 16, .begin = begin, .end = begin + 1000, .rows = 1000};
    run.weights = weights;
    table.store(run);
  }
  CHECK_EQ(table.row_count(), kMany);
  std::vector<int64_t> keys(kMany);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  std::vector<float> got(kMany * 16);
  table.gather(keys, got.data());
  for (size_t i = 0; i < got.size(); ++i) CHECK_EQ(got[i], static_cast<float>(i / 16));
  // Nothing is made for rows that will not come.
  CHECK(table.size_bytes() < kMany * (80 + 8 * 100 / 35) + (8u << 20));
}

// Of a table whose rows nobody can count beforehand: 32 MiB were made for rows that need one.
TEST(table_of_any_number_of_rows_makes_no_memory_ahead_for_more_than_are_loaded) {
  constexpr uint64_t kSome = 10000;
  for (const bool as_columns : {false, true}) {
    wire::TableSpec spec{"words", uint64_t{1} << 40, 16, 0};
    spec.remote = true;
    table::Table table(0, spec, sgd(), 0, 1, {}, std::make_shared<table::MemoryAhead>());
    const std::vector<float> weights(16 * kSome, 2.0f);
    std::vector<int64_t> keys(kSome);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
    if (as_columns) {
      table::RowColumns columns;
      columns.rows = kSome;
      columns.keys = reinterpret_cast<const uint8_t*>(keys.data());
      columns.weights = reinterpret_cast<const uint8_t*>(weights.data());
      table.load(columns);
    } else {
      wire::RunView run;
      run.ref = {.dim = 16, .begin = 0, .end = kSome, .rows = kSome};
      run.weights = weights;
      table.store(run);
    }
    CHECK_EQ(table.row_count(), kSome);
    CHECK(table.size_bytes() < (8u << 20));
  }
}

TEST(memory_ahead_is_taken_whether_it_is_made_or_not) {
  table::MemoryAhead ahead;
  const auto dropped = ahead.order(1 << 20);
  std::vector<table::MemoryAhead::OrderPtr> orders;
  for (int i = 0; i < 20; ++i) orders.push_back(ahead.order(1 << 16));
  for (const auto& order : orders) {
    const auto memory = ahead.take(order);
    CHECK_EQ(memory.size(), size_t{1} << 16);
    for (size_t i = 0; i < memory.size(); i += 511) CHECK_EQ(memory[i], 0);
  }
  orders.clear();
  for (int i = 0; i < 20; ++i) orders.push_back(ahead.order(1 << 16));  // left when it goes
}

// Whoever fills a table makes memory beside the thread that does, in any order.
TEST(memory_ahead_is_taken_in_any_order_each_once) {
  table::MemoryAhead ahead;
  std::deque<table::MemoryAhead::OrderPtr> orders;
  std::vector<table::MemoryAhead::Memory> taken;
  std::set<const uint8_t*> addresses;
  for (int i = 0; i < 40; ++i) {
    while (orders.size() < 8) orders.push_back(ahead.order(1 << 16));
    const auto order = ahead.next_of(&orders);
    CHECK_EQ(orders.size(), 7u);
    CHECK(std::find(orders.begin(), orders.end(), order) == orders.end());
    taken.push_back(ahead.take(order));
    CHECK_EQ(taken.back().size(), size_t{1} << 16);
    addresses.insert(taken.back().data());
    for (size_t at = 0; at < taken.back().size(); at += 511) CHECK_EQ(taken.back()[at], 0);
    taken.back()[0] = 1;
  }
  CHECK_EQ(addresses.size(), taken.size());
}

}  // namespace cpudist::testing
