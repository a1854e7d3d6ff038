// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Averages beside values: of rows and blocks that are updated now and then, against the average
// that is taken after every update.

#include <cmath>
#include <cstring>
#include <random>

#include "support/server_fixture.h"
#include "table/average.h"
#include "table/dense_block.h"
#include "table/table.h"

namespace cpudist::testing {
namespace {

constexpr double kDecay = 0.9;
constexpr uint32_t kDim = 3;

table::Table table_of(const std::vector<int64_t>& keys, const std::vector<float>& weights) {
  wire::TableSpec spec;
  spec.name = "t";
  spec.rows = 100;
  spec.dim = kDim;
  table::Table made(0, spec, sgd(), 0, 1, {kDecay});
  wire::TableRows rows;
  rows.keys = keys;
  rows.weights = weights;
  made.store(rows);
  return made;
}

// As an update of the server does.
void step_row(table::Table& rows, uint32_t record, uint64_t round, float by) {
  rows.settle_average(record, round);
  ++rows.header(record).count;
  rows.header(record).last_seen = static_cast<uint32_t>(round);
  for (uint32_t i = 0; i < kDim; ++i) rows.weight(record)[i] -= by;
  rows.follow_average(record, round);
}

}  // namespace

TEST(averages_power_is_that_of_the_decay) {
  const table::Averaging averaging{kDecay};
  for (const uint64_t updates : {0ull, 1ull, 2ull, 7ull, 64ull, 1000ull}) {
    CHECK_NEAR(averaging.power(updates), std::pow(kDecay, static_cast<double>(updates)), 1e-14);
  }
  CHECK_EQ(averaging.power(0xffffffffffffffffull), 0.0);
  CHECK(!table::Averaging{}.on());
}

TEST(averages_of_rows_are_those_taken_after_every_update) {
  // Across the place where the low half of the round begins anew.
  for (const uint64_t first : {uint64_t{0}, (uint64_t{1} << 32) - 40}) {
    const std::vector<int64_t> keys = {3, 7, 11, 50};
    std::vector<float> weights(keys.size() * kDim);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i);
    table::Table rows = table_of(keys, weights);
    std::vector<uint32_t> records(keys.size());
    rows.find(keys, records.data(), nullptr);
    std::vector<double> values(weights.begin(), weights.end());
    std::vector<double> averages = values;
    std::mt19937 random(5);
    for (uint64_t round = first; round < first + 100; ++round) {
      const uint32_t touched = random() % 3;  // the last row never is
      const bool twice = random() % 4 == 0;
      for (uint32_t row = 0; row < 3; ++row) {
        if (row != touched && !(twice && row == 0)) continue;
        step_row(rows, records[row], round, 0.125f * static_cast<float>(row + 1));
        for (uint32_t i = 0; i < kDim; ++i) values[row * kDim + i] -= 0.125 * (row + 1);
      }
      const double kept = round == 0 ? 0.0 : kDecay;
      for (size_t i = 0; i < values.size(); ++i) {
        averages[i] = kept * averages[i] + (1 - kept) * values[i];
      }
      std::vector<float> found(values.size());
      rows.gather_averages(keys, round + 1, found.data());
      for (size_t i = 0; i < found.size(); ++i) CHECK_NEAR(found[i], averages[i], 2e-5);
    }
  }
}

TEST(averages_of_rows_follow_a_new_count_of_updates) {
  const std::vector<int64_t> keys = {3, 7};
  table::Table rows = table_of(keys, {1, 2, 3, 4, 5, 6});
  std::vector<uint32_t> records(keys.size());
  rows.find(keys, records.data(), nullptr);
  for (uint64_t round = 0; round < 5; ++round) step_row(rows, records[0], round, 1);
  const auto averages = [&](uint64_t updates) {
    std::vector<float> found(keys.size() * kDim);
    rows.gather_averages(keys, updates, found.data());
    return found;
  };
  const auto before = averages(9);
  uint64_t counted = 9;
  for (const uint64_t after : {uint64_t{2}, uint64_t{1} << 33, uint64_t{9}}) {
    rows.renumber(counted, after);
    counted = after;
    CHECK(averages(counted) == before);
  }
  CHECK_EQ(rows.header(records[0]).last_seen, 4u);
}

// A row may have come from a server that was ahead of those whose updates are counted.
TEST(averages_of_rows_that_are_ahead_are_as_of_their_last_update) {
  for (const uint64_t round : {uint64_t{6}, (uint64_t{1} << 32) + 2}) {
    const std::vector<int64_t> keys = {3};
    table::Table rows = table_of(keys, {1, 2, 3});
    uint32_t record = 0;
    rows.find(keys, &record, nullptr);
    for (uint64_t at = round - 4; at <= round; ++at) step_row(rows, record, at, 1);
    std::vector<float> newest(kDim);
    rows.gather_averages(keys, round + 1, newest.data());
    CHECK(newest[0] != rows.weight(record)[0]);
    for (const uint64_t updates : {round - 4, round - 1, round}) {
      std::vector<float> found(kDim);
      rows.gather_averages(keys, updates, found.data());
      CHECK(found == newest);
      rows.settle_average(record, updates);
      rows.gather_averages(keys, round + 1, found.data());
      CHECK(found == newest);
    }
  }
}

TEST(averages_begin_anew_with_what_is_stored) {
  const std::vector<int64_t> keys = {1};
  table::Table rows = table_of(keys, {1, 2, 3});
  uint32_t record = 0;
  rows.find(keys, &record, nullptr);
  for (uint64_t round = 0; round < 9; ++round) step_row(rows, record, round, 1.0f);
  const std::vector<float> weights = {7, 8, 9};
  const std::vector<uint32_t> counts = {9};
  wire::TableRows stored;
  stored.keys = keys;
  stored.weights = weights;
  stored.counts = counts;
  rows.store(stored);
  float found[kDim];
  rows.gather_averages(keys, 20, found);
  for (uint32_t i = 0; i < kDim; ++i) CHECK_EQ(found[i], weights[i]);
}

TEST(averages_take_their_room_and_no_more) {
  wire::TableSpec spec;
  spec.name = "t";
  spec.rows = 1;
  spec.dim = 16;
  table::Table plain(0, spec, sgd(), 0, 1);
  table::Table averaged(0, spec, sgd(), 0, 1, {kDecay});
  const std::vector<int64_t> keys = {0};
  const std::vector<float> weights(16, 1.0f);
  wire::TableRows rows;
  rows.keys = keys;
  rows.weights = weights;
  plain.store(rows);
  averaged.store(rows);
  CHECK(!plain.averaged());
  CHECK(averaged.size_bytes() > plain.size_bytes());
}

TEST(averages_of_blocks_are_those_taken_after_every_update) {
  wire::BlockSpec spec;
  spec.name = "b";
  spec.elements = 2;
  spec.dtype = wire::DType::kFloat64;
  table::DenseBlock block(0, spec, sgd(), {kDecay});
  const double first[2] = {4, -1};
  wire::BlockValues values;
  values.weights = {reinterpret_cast<const uint8_t*>(first), sizeof first};
  block.store(values);
  CHECK_EQ(block.size_bytes(), 2 * sizeof first);
  double value[2] = {4, -1};
  double average[2] = {4, -1};
  const double gradient[2] = {0.5, -0.25};
  for (uint64_t round = 0; round < 40; ++round) {
    if (round % 5 == 0) {
      block.update(sgd(), gradient, round);
      for (int i = 0; i < 2; ++i) value[i] -= gradient[i];
    }
    const double kept = round == 0 ? 0.0 : kDecay;
    double found[2];
    block.read_average(round + 1, reinterpret_cast<uint8_t*>(found));
    for (int i = 0; i < 2; ++i) {
      average[i] = kept * average[i] + (1 - kept) * value[i];
      CHECK_NEAR(found[i], average[i], 1e-12);
    }
  }
}

}  // namespace cpudist::testing
