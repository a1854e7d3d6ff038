// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: what admits a key, drops it and bounds rows, by one fixture
//
// Which pushes make rows: open tables of any keys, admission by count and by chance, bounds of
// rows, and what keys without a row read as.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>

#include "support/remote_fixture.h"
#include "table/admission/rule.h"

namespace cpudist::testing {
namespace {

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

// Rows of zeros; SGD with rate 1 makes a row the negated mean of what was applied.
wire::ParamSetLayout open_layout(const wire::Admission& admission = {}) {
  wire::ParamSetLayout layout = remote_layout();
  layout.tables[0].rows = 1;  // says nothing
  layout.tables[0].open = true;
  layout.tables[0].initial = {};
  layout.tables[0].overrides = {};
  layout.tables[0].admission = admission;
  return layout;
}

wire::Admission by_count(uint32_t count) {
  return {wire::AdmissionKind::kCount, count, 1.0, 1 << 20};
}

struct OpenWorld : World {
  explicit OpenWorld(const wire::ParamSetLayout& given, uint32_t trainer_count = 1)
      : World(given, server_options(trainer_count), false) {
    make_ready(*this);
  }
  uint64_t ask(size_t rank, const std::vector<RowGradient>& rows,
               const wire::PushHeader& header = {}) {
    return (*this)[rank].ask(wire::FrameKind::kPush, remote_push(*this, header, rows));
  }
  // A round of all, each with its rows.
  void round(uint64_t number, const std::vector<std::vector<RowGradient>>& rows) {
    std::vector<uint64_t> asked;
    wire::PushHeader header;
    header.round = number;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      asked.push_back(ask(rank, rows[rank], header));
    }
    for (size_t rank = 0; rank < rows.size(); ++rank) (*this)[rank].reply(asked[rank]);
  }
  float value(int64_t key) { return pulled_rows((*this)[0], layout, {key}).front(); }
  server::TableStats stats() const { return server.table_stats().at(0); }
};

}  // namespace

TEST(open_table_has_every_key) {
  wire::ParamSetLayout layout = open_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.tables[0].overrides = {{~0ull, 0, 0.5}};
  OpenWorld world(layout);
  const std::vector<int64_t> keys = {kLowest, -5, -1, 0, 1, 5, kHighest};
  std::vector<RowGradient> rows;
  for (const int64_t key : keys) rows.push_back({key, static_cast<float>(rows.size() + 1)});
  world[0].reply(world.ask(0, rows));
  for (size_t i = 0; i < keys.size(); ++i) {
    const float begun = keys[i] == -1 ? 0.5f : 0.0f;
    CHECK_EQ(world.value(keys[i]), begun - static_cast<float>(i + 1));
  }
  CHECK_EQ(world.value(-4), 0.0f);
  CHECK_EQ(world.stats().rows, keys.size());
  CHECK_EQ(world.stats().unknown_reads, 1u);
}

TEST(closed_table_has_its_own_keys_still) {
  wire::ParamSetLayout layout = open_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.tables[0].open = false;
  for (const int64_t key : {int64_t{-1}, int64_t{1}}) {
    OpenWorld world(layout);
    world[0].reply(world.ask(0, {{0, 1.0f}}));
    CHECK_THROWS(world.ask(0, {{key, 1.0f}}), Error);  // who sends such bytes is cut off
    CHECK_EQ(world.stats().rows, 1u);
  }
}

TEST(open_table_reads_zeros_of_unknown_keys) {
  wire::ParamSetLayout layout = open_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.tables[0].initial = {{kernels::InitialOp::kFill, 3.0, 0}};
  layout.tables[0].unknown_zeros = true;
  layout.average_decay = 0.5;
  OpenWorld world(layout);
  CHECK_EQ(world.value(-9), 0.0f);
  world[0].reply(world.ask(0, {{-9, 1.0f}}));
  CHECK_EQ(world.value(-9), 2.0f);  // its row begins as it always would
  CHECK_EQ(world.value(9), 0.0f);
}

TEST(count_filter_makes_a_row_with_its_nth_push) {
  wire::ParamSetLayout layout = open_layout(by_count(3));
  layout.mode = wire::UpdateMode::kOnArrival;
  OpenWorld world(layout);
  const auto push = [&](const std::vector<RowGradient>& rows) {
    const float dense = world.floats(0)[0];
    world[0].reply(world.ask(0, rows));
    CHECK_EQ(world.floats(0)[0], dense - 0.5f);  // dense values are updated in any case
  };
  push({{-1, 1.0f}, {2, 1.0f}});
  push({{-1, 1.0f}});
  CHECK_EQ(world.stats().rows, 0u);
  CHECK_EQ(world.stats().filtered, 3u);
  CHECK_EQ(world.value(-1), 0.0f);
  push({{2, 1.0f}, {-1, 4.0f}, {3, 1.0f}});
  CHECK_EQ(world.value(-1), -4.0f);
  CHECK_EQ(world.value(2), 0.0f);
  CHECK_EQ(world.stats().rows, 1u);
  CHECK_EQ(world.stats().created, 1u);
  CHECK_EQ(world.stats().filtered, 5u);
  push({{-1, 1.0f}, {2, 2.0f}});
  CHECK_EQ(world.value(-1), -5.0f);
  CHECK_EQ(world.value(2), -2.0f);
  CHECK_EQ(world.stats().filtered, 5u);
}

TEST(count_filter_counts_a_key_once_for_each_push) {
  wire::ParamSetLayout layout = open_layout(by_count(2));
  layout.mode = wire::UpdateMode::kOnArrival;
  OpenWorld world(layout);
  world[0].reply(world.ask(0, {{4, 1.0f}, {4, 1.0f}, {5, 1.0f}}));
  CHECK_EQ(world.stats().rows, 0u);
  CHECK_EQ(world.stats().filtered, 2u);
  world[0].reply(world.ask(0, {{4, 1.0f}, {4, 2.0f}}));
  CHECK_EQ(world.value(4), -3.0f);
}

// Of the pushes of a round those of lower ranks come first.
TEST(count_filter_drops_the_first_pushes_of_a_round) {
  OpenWorld world(open_layout(by_count(3)), 4);
  world.round(0, {{{-8, 1.0f}}, {}, {{-8, 2.0f}, {6, 1.0f}}, {}});
  CHECK_EQ(world.stats().filtered, 3u);
  CHECK_EQ(world.stats().rows, 0u);
  world.round(1, {{}, {{-8, 4.0f}}, {{6, 8.0f}}, {{-8, 8.0f}, {6, 16.0f}}});
  CHECK_EQ(world.value(-8), -12.0f / 4);
  CHECK_EQ(world.value(6), -16.0f / 4);
  CHECK_EQ(world.stats().filtered, 4u);
}

// What is dropped has no part in the norm of what is clipped.
TEST(count_filter_clips_what_is_applied) {
  OpenWorld world(open_layout(by_count(2)));
  wire::PushHeader header;
  header.clip_norm = 1e6;
  const auto norm_of = [&](const std::vector<RowGradient>& rows, uint64_t number) {
    header.round = number;
    const auto request = world.ask(0, rows, header);
    const wire::Frame frame = world[0].reply(request);
    const double norm = wire::decode_push_norm(view(frame.payload)).squared_norms.at(0);
    world[0].reply(
        world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{number, {std::sqrt(norm)}})));
    return norm;
  };
  const double dense = norm_of({}, 0);
  CHECK_EQ(norm_of({{1, 8.0f}, {2, 8.0f}}, 1), dense);
  CHECK_EQ(norm_of({{1, 8.0f}, {3, 8.0f}}, 2), dense + 4 * 64);
  CHECK_EQ(world.value(1), -8.0f);
}

namespace {

// What a table that counts is to hold: rows of zeros under SGD, and what was dropped.
struct CountModel {
  uint32_t wanted;
  std::map<int64_t, uint32_t> counted;
  std::map<int64_t, float> rows;
  uint64_t filtered = 0;

  void update(const std::vector<std::vector<RowGradient>>& pushes) {
    std::map<int64_t, float> sums;
    for (const auto& push : pushes) {
      for (const RowGradient& row : push) {
        const bool known = rows.contains(row.key);
        if (!known && ++counted[row.key] < wanted) {
          ++filtered;
          continue;
        }
        sums[row.key] += row.value;
      }
    }
    for (const auto& [key, sum] : sums) {
      rows[key] -= sum * (1.0f / static_cast<float>(pushes.size()));
    }
  }
};

std::vector<RowGradient> any_rows(std::mt19937_64& random) {
  std::map<int64_t, float> rows;
  for (int i = 0; i < 20; ++i) {
    const auto key = static_cast<int64_t>(kernels::mix64(1 + random() % (1 + random() % 60)));
    rows[key] = static_cast<float>(static_cast<int64_t>(random() % 9) - 4);
  }
  std::vector<RowGradient> found;
  for (const auto& [key, value] : rows) found.push_back({key, value});
  std::shuffle(found.begin(), found.end(), random);
  return found;
}

}  // namespace

TEST(count_filter_is_as_a_dictionary_says) {
  for (const uint32_t trainers : {1u, 2u, 4u}) {
    for (const uint32_t wanted : {1u, 2u, 5u, 15u}) {
      std::mt19937_64 random(trainers * 100 + wanted);
      OpenWorld world(open_layout(by_count(wanted)), trainers);
      CountModel model{wanted, {}, {}, 0};
      for (uint64_t number = 0; number < 25; ++number) {
        std::vector<std::vector<RowGradient>> pushes;
        for (uint32_t rank = 0; rank < trainers; ++rank) pushes.push_back(any_rows(random));
        world.round(number, pushes);
        model.update(pushes);
        CHECK_EQ(world.stats().rows, model.rows.size());
        CHECK_EQ(world.stats().filtered, model.filtered);
      }
      CHECK(!model.rows.empty());
      for (const auto& [key, count] : model.counted) {
        const auto row = model.rows.find(key);
        CHECK_EQ(world.value(key), row == model.rows.end() ? 0.0f : row->second);
      }
    }
  }
}

TEST(count_filter_counts_nothing_of_a_push_that_fails) {
  wire::ParamSetLayout layout = open_layout(by_count(2));
  layout.mode = wire::UpdateMode::kOnArrival;
  int64_t refused = 0;
  bool happened = true;
  for (int64_t nth = 0; happened; ++nth) {
    CHECK(nth < 1000);
    OpenWorld world(layout);
    world[0].reply(world.ask(0, {{1, 1.0f}}));
    const Buffer push = remote_push(world, {}, {{1, 1.0f}, {-2, 1.0f}});
    happened = push_without_memory(world, push, nth);
    const server::TableStats stats = world.stats();
    const bool applied = stats.rows == 1;
    CHECK_EQ(stats.filtered, applied ? 2u : 1u);
    refused += applied ? 0 : 1;
  }
  CHECK(refused > 5);
}

// In two phases rows are made by the first, which clips: before that all memory is there.
TEST(count_filter_counts_nothing_of_a_round_that_is_refused) {
  int64_t refused = 0;
  at_every_allocation([&](int64_t nth) {
    OpenWorld world(open_layout(by_count(2)), 2);
    world.round(0, {{{1, 1.0f}}, {}});
    wire::PushHeader header;
    header.round = 1;
    header.clip_norm = 1e6;
    const auto waits = world.ask(1, {{1, 1.0f}, {-2, 1.0f}, {-3, 1.0f}}, header);
    const Buffer push = remote_push(world, header, {{1, 1.0f}, {-2, 1.0f}});
    const bool happened = push_without_memory(world, push, nth);
    if (world[1].waits(waits)) return happened;
    const wire::Frame told = world[1].answer(waits);
    const bool merged = told.header.kind == wire::FrameKind::kReply;
    // Else there was no memory to tell of it, which ends the set.
    if (!merged && wire::decode_error(view(told.payload)).code != ErrorCode::kOverloaded) {
      return happened;
    }
    refused += merged ? 0 : 1;
    const server::TableStats stats = world.stats();
    CHECK_EQ(stats.created, merged ? 2u : 0u);
    CHECK_EQ(stats.filtered, merged ? 3u : 1u);
    return happened;
  });
  CHECK(refused > 5);
}

TEST(count_filter_counts_no_push_without_weight) {
  OpenWorld world(open_layout(by_count(2)), 3);
  const auto round = [&](uint64_t number, const std::array<double, 3>& weights,
                         const std::array<std::vector<RowGradient>, 3>& rows) {
    std::array<uint64_t, 3> asked{};
    wire::PushHeader header;
    header.round = number;
    header.by_samples = true;
    for (size_t rank = 0; rank < 3; ++rank) {
      header.weight = weights[rank];
      asked[rank] = world.ask(rank, rows[rank], header);
    }
    for (size_t rank = 0; rank < 3; ++rank) world[rank].reply(asked[rank]);
  };
  round(0, {0, 4, 4}, {{{{1, 8.0f}, {2, 8.0f}}, {{2, 8.0f}}, {{3, 8.0f}}}});
  CHECK_EQ(world.stats().rows, 0u);
  CHECK_EQ(world.stats().filtered, 2u);  // of keys 2 and 3
  round(1, {0, 4, 4}, {{{{1, 8.0f}, {2, 8.0f}}, {{1, 8.0f}}, {}}});
  CHECK_EQ(world.stats().rows, 0u);
  CHECK_EQ(world.stats().filtered, 3u);
  // A push that counts makes the row; what has no weight stays without, before it and behind.
  round(2, {0, 4, 0}, {{{{1, 8.0f}}, {{1, 8.0f}}, {{1, 8.0f}, {2, 8.0f}}}});
  CHECK_EQ(world.value(1), -8.0f);
  CHECK_EQ(world.stats().rows, 1u);
  CHECK_EQ(world.stats().filtered, 3u);
  round(3, {0, 0, 0}, {{{{2, 8.0f}}, {{2, 8.0f}}, {{3, 8.0f}}}});
  round(4, {0, 4, 4}, {{{}, {{2, 8.0f}}, {}}});
  CHECK_EQ(world.value(2), -4.0f);
  CHECK_EQ(world.stats().rows, 2u);
  CHECK_EQ(world.stats().filtered, 3u);
}

TEST(count_filter_counts_nothing_of_gradients_that_are_left_out) {
  server::ServerOptions options = server_options(1);
  options.nonfinite = server::NonFinite::kSkip;
  World world(open_layout(by_count(2)), options, false);
  make_ready(world);
  wire::PushHeader header;
  for (; header.round < 3; ++header.round) {
    const Buffer push = remote_push(world, header, {{1, 1.0f}, {2, std::nanf("")}});
    world[0].reply(world[0].ask(wire::FrameKind::kPush, push.share()));
  }
  const server::TableStats stats = world.server.table_stats().at(0);
  CHECK_EQ(stats.rows, 0u);
  CHECK_EQ(stats.filtered, 0u);
}

TEST(probability_makes_rows_of_the_same_keys_always) {
  wire::ParamSetLayout layout = open_layout({wire::AdmissionKind::kProbability, 0, 0.5, 0});
  layout.mode = wire::UpdateMode::kOnArrival;
  OpenWorld world(layout);
  table::AdmissionRule rule(layout.tables[0]);
  std::vector<RowGradient> rows;
  for (int64_t key = -50; key < 50; ++key) rows.push_back({key, 1.0f});
  for (int i = 0; i < 2; ++i) world[0].reply(world.ask(0, rows));
  uint64_t admitted = 0;
  for (const RowGradient& row : rows) {
    const bool admits = rule.pushes_until(row.key) == 1;
    admitted += admits ? 1 : 0;
    CHECK_EQ(world.value(row.key), admits ? -2.0f : 0.0f);
  }
  CHECK(admitted > 25 && admitted < 75);
  CHECK_EQ(world.stats().rows, admitted);
  CHECK_EQ(world.stats().filtered, 2 * (100 - admitted));
}

TEST(bound_of_rows_refuses_what_would_be_more) {
  wire::ParamSetLayout layout = open_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.tables[0].max_rows = 3;
  OpenWorld world(layout);
  world[0].reply(world.ask(0, {{1, 1.0f}, {-1, 1.0f}}));
  const float dense = world.floats(0)[0];
  const std::string text =
      world[0].error(world.ask(0, {{1, 1.0f}, {2, 1.0f}, {3, 1.0f}}), ErrorCode::kTableFull);
  CHECK(contains(text, "table emb: 2 new rows beside the 2 on server 0"));
  CHECK(contains(text, "max_rows = 3"));
  CHECK_EQ(world.value(1), -1.0f);
  CHECK_EQ(world.floats(0)[0], dense);
  CHECK_EQ(world.stats().rows, 2u);
  // The next one is another push: what there is can be updated, and one more may come.
  world[0].reply(world.ask(0, {{1, 1.0f}, {3, 1.0f}}));
  CHECK_EQ(world.value(1), -2.0f);
  CHECK_EQ(world.stats().rows, 3u);
  world[0].reply(world.ask(0, {{1, 1.0f}, {3, 1.0f}}));
  world[0].error(world.ask(0, {{4, 1.0f}}), ErrorCode::kTableFull);
}

TEST(bound_of_rows_ends_a_round_for_all) {
  wire::ParamSetLayout layout = open_layout();
  layout.tables[0].max_rows = 1;
  OpenWorld world(layout, 2);
  const auto first = world.ask(0, {{1, 1.0f}});
  const auto second = world.ask(1, {{2, 1.0f}});
  const std::string text = world[0].error(first, ErrorCode::kTableFull);
  CHECK_EQ(world[1].error(second, ErrorCode::kTableFull), text);
  CHECK_EQ(world.stats().rows, 0u);
}

TEST(bound_of_rows_counts_those_that_are_admitted) {
  wire::ParamSetLayout layout = open_layout(by_count(2));
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.tables[0].max_rows = 1;
  OpenWorld world(layout);
  const std::vector<RowGradient> both = {{1, 1.0f}, {2, 1.0f}};
  world[0].reply(world.ask(0, both));
  world[0].error(world.ask(0, both), ErrorCode::kTableFull);
  CHECK_EQ(world.stats().filtered, 2u);  // that push counted nothing
  world[0].reply(world.ask(0, {{2, 1.0f}}));
  CHECK_EQ(world.value(2), -1.0f);
}

// All servers together have room for as many rows at least.
TEST(bound_of_rows_is_shared_by_servers) {
  wire::ParamSetLayout layout = open_layout();
  layout.tables[0].max_rows = 10;
  uint64_t most = 0;
  for (uint32_t shard = 0; shard < 3; ++shard) {
    table::Table table(0, layout.tables[0], sgd(), shard, 3);
    uint64_t fits = 0;
    const auto refuses = [&table](uint64_t rows) {
      try {
        table.check_bound(rows);
      } catch (const Error& error) {
        return error.code() == ErrorCode::kTableFull;
      }
      return false;
    };
    while (!refuses(fits + 1)) ++fits;
    most += fits;
    CHECK_EQ(fits, 4u);
  }
  CHECK_EQ(most, 12u);
}

TEST(count_filter_keeps_its_sketch_under_the_cap) {
  const wire::ParamSetLayout layout = open_layout(by_count(2));
  server::ServerOptions options = server_options(1);
  const uint64_t kept = values_bytes(layout, options);
  CHECK(kept > 1 << 20);
  wire::ParamSetLayout plain = layout;
  plain.tables[0].admission = {};
  CHECK_EQ(kept - values_bytes(plain, options), uint64_t{1} << 20);
  options.memory_cap_bytes = kept / 2;
  World small(plain, options, false);
  const auto id = small[0].ask(wire::FrameKind::kOpen, encode(layout), 1);
  CHECK(contains(small[0].error(id, ErrorCode::kOverloaded), "MEMORY_CAP_BYTES"));
}

}  // namespace cpudist::testing
