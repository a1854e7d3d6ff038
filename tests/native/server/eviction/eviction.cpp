// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows that lose their places on a server: pushes that wait meanwhile, rows that trainers hold,
// what is kept for gradients that come late, and what a server tells of it.

#include "support/remote_fixture.h"

namespace cpudist::testing {
namespace {

wire::ParamSetLayout evicting_layout(const wire::Eviction& rule) {
  wire::ParamSetLayout layout = remote_layout();
  layout.tables[0].initial = {{kernels::InitialOp::kFill, 3.0, 0}};
  layout.tables[0].overrides = {};
  layout.tables[0].eviction = rule;
  layout.tables[0].eviction.on = true;
  return layout;
}

struct Evicting : World {
  explicit Evicting(const wire::ParamSetLayout& given, uint32_t trainer_count = 1)
      : World(given, server_options(trainer_count), false) {
    make_ready(*this);
  }

  uint64_t push(size_t rank, const std::vector<RowGradient>& rows, wire::PushHeader header = {}) {
    return trainers[rank]->ask(wire::FrameKind::kPush, remote_push(*this, header, rows));
  }
  // By the only trainer of a round.
  void update(const std::vector<RowGradient>& rows) {
    wire::PushHeader header;
    header.round = round++;
    trainers[0]->reply(push(0, rows, header));
  }
  float value(int64_t key) { return row(key)[0]; }
  server::TableStats stats() { return server.table_stats()[0]; }
  wire::TableCounts counts(size_t rank, uint32_t table = 0) {
    Trainer& trainer = *trainers[rank];
    const wire::Frame frame = trainer.reply(
        trainer.plain(wire::FrameKind::kTableStats, 0, encode(wire::TableQuery{table})));
    return wire::decode_table_counts(view(frame.payload));
  }
  uint64_t shrink(size_t rank) {
    Trainer& trainer = *trainers[rank];
    const uint64_t request = trainer.ask(wire::FrameKind::kShrink, encode(wire::TableQuery{0}));
    CHECK(trainer.comes(request));
    return wire::decode_shrunk(view(trainer.reply(request).payload)).evicted;
  }

  uint64_t round = 0;
};

}  // namespace

TEST(server_evicts_rows_at_the_end_of_updates) {
  Evicting world(evicting_layout({.unseen_steps = 2}));
  world.update({{1, 1.0f}, {2, 1.0f}});
  world.update({{1, 1.0f}});
  CHECK_EQ(world.value(2), 2.0f);
  world.update({{1, 1.0f}});
  CHECK_EQ(world.value(1), 0.0f);
  CHECK_EQ(world.value(2), 3.0f);  // as it began
  world.update({{2, 2.0f}});
  CHECK_EQ(world.value(2), 1.0f);
  const wire::TableCounts counts = world.counts(0);
  CHECK_EQ(counts.rows, 2u);
  CHECK_EQ(counts.created, 3u);
  CHECK_EQ(counts.evicted, 1u);
  CHECK(counts.bytes > 0);
  CHECK_EQ(world.stats().evicted, 1u);
  CHECK_EQ(world.stats().rows, 2u);
  const auto unknown = world[0].plain(wire::FrameKind::kTableStats, 0, encode(wire::TableQuery{9}));
  CHECK(contains(world[0].error(unknown, ErrorCode::kInvalidArgument), "no table 9"));
}

TEST(server_shrinks_a_table_when_it_is_asked) {
  Evicting world(evicting_layout({.unseen_steps = 1, .min_count = 2}), 2);
  const auto both = [&](const std::vector<RowGradient>& rows) {
    wire::PushHeader header;
    header.round = world.round++;
    world.push(0, rows, header);
    world[1].reply(world.push(1, rows, header));
  };
  both({{1, 1.0f}, {2, 1.0f}});
  CHECK_EQ(world.shrink(1), 0u);  // rows of the last update stay
  both({{1, 1.0f}});
  CHECK_EQ(world.counts(1).evicted, 1u);
  CHECK_EQ(world.shrink(0), 0u);
  CHECK(world.counts(0).rows == 1 && world.value(2) == 3.0f);
  // A bound of a table that was stored with more rows than that holds from now on.
  Evicting stored(evicting_layout({.max_rows = 3}));
  std::vector<int64_t> keys(40);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  stored[0].reply(stored[0].ask(wire::FrameKind::kStore, store_begun(stored, keys)));
  CHECK_EQ(stored.shrink(0), 0u);  // they have only just come
  stored.update({{50, 1.0f}});
  stored.update({{50, 1.0f}});
  CHECK_EQ(stored.counts(0).rows, 3u);
  CHECK_EQ(stored.value(50), 1.0f);
  // Nothing goes of a table that evicts nothing, and there is no other table.
  World plain(1);
  const uint64_t none = plain[0].ask(wire::FrameKind::kShrink, encode(wire::TableQuery{0}));
  CHECK(plain[0].comes(none));
  CHECK_EQ(wire::decode_shrunk(view(plain[0].reply(none).payload)).evicted, 0u);
  const uint64_t wrong = plain[0].ask(wire::FrameKind::kShrink, encode(wire::TableQuery{1}));
  CHECK(plain[0].comes(wrong));
  CHECK(contains(plain[0].error(wrong, ErrorCode::kInvalidArgument), "no table 1"));
}

// Its sender is frozen, or waits: the record that was found for a row may be that of another one.
TEST(server_finds_rows_of_a_push_that_waits_again_where_some_have_gone) {
  wire::ParamSetLayout layout = evicting_layout({.max_rows = 3});
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.max_staleness = 2;
  Evicting world(layout, 3);
  world[0].reply(world.push(0, {{10, 1.0f}, {12, 1.0f}, {13, 1.0f}}));
  const auto held = world.push(0, {{10, 0.5f}, {11, 1.0f}});  // of record 0, and one to be made
  CHECK(world[0].waits(held));
  world[1].reply(world.push(1, {{20, 1.0f}}));
  CHECK_EQ(world.value(10), 3.0f);  // gone
  CHECK(world[0].waits(held));
  // In its record lies another row when the push is applied.
  world[2].reply(world.push(2, {{21, 1.0f}}));
  world[0].reply(held);
  CHECK_EQ(world.value(21), 2.0f);
  CHECK_EQ(world.value(10), 2.5f);
  CHECK_EQ(world.value(11), 2.0f);
  CHECK_EQ(world.stats().rows, 3u);
  CHECK_EQ(world.stats().created, 7u);
  CHECK_EQ(world.stats().evicted, 4u);
}

// The same in rounds of two groups, which do not wait for each other.
TEST(server_finds_rows_of_a_round_again_where_another_group_has_evicted_some) {
  wire::ParamSetLayout layout = evicting_layout({.max_rows = 3});
  layout.trainer_groups = {0, 1, 0};
  Evicting world(layout, 3);
  const auto header = [](uint64_t round) {
    wire::PushHeader made;
    made.round = round;
    return made;
  };
  world[1].reply(world.push(1, {{10, 1.0f}, {12, 1.0f}, {13, 1.0f}}, header(0)));
  const auto first = world.push(0, {{10, 0.5f}, {12, 0.5f}}, header(0));
  CHECK(world[0].waits(first));
  world[1].reply(world.push(1, {{20, 1.0f}}, header(1)));              // 10 goes
  world[1].reply(world.push(1, {{21, 1.0f}, {13, 1.0f}}, header(2)));  // 12 goes
  CHECK_EQ(world.value(12), 3.0f);
  world[2].reply(world.push(2, {{10, 0.5f}}, header(0)));
  world[0].reply(first);
  CHECK_EQ(world.value(10), 2.5f);
  CHECK_EQ(world.value(12), 2.75f);
  // Of the others one stays, as it was: the last updated that has had most updates.
  CHECK_EQ(world.value(13), 1.0f);
  CHECK_EQ(world.value(20), 3.0f);
  CHECK_EQ(world.value(21), 3.0f);
}

// Between the two phases of a round that clips its rows are merged already.
TEST(server_keeps_rows_of_a_round_that_waits_for_its_commits) {
  wire::ParamSetLayout layout = evicting_layout({.unseen_steps = 1});
  layout.trainer_groups = {0, 1};
  Evicting world(layout, 2);
  wire::PushHeader clipping;
  clipping.clip_norm = 1e6;
  const auto push = world.push(0, {{10, 1.0f}, {11, 1.0f}}, clipping);
  const auto norm = wire::decode_push_norm(view(world[0].reply(push).payload));
  wire::PushHeader header;
  for (header.round = 0; header.round < 5; ++header.round) {
    world[1].reply(world.push(1, {{static_cast<int64_t>(20 + header.round), 1.0f}}, header));
  }
  CHECK_EQ(world.stats().rows, 3u);  // of the others the last one
  world[0].reply(world[0].ask(wire::FrameKind::kCommit,
                              encode(wire::Commit{0, {std::sqrt(norm.squared_norms[0])}})));
  CHECK_EQ(world.value(10), 2.0f);
  CHECK_EQ(world.value(11), 2.0f);
  CHECK_EQ(world.value(24), 3.0f);
  CHECK_EQ(world.stats().rows, 2u);
  // After that they go as others do.
  world[1].reply(world.push(1, {{30, 1.0f}}, header));
  CHECK_EQ(world.stats().rows, 1u);
}

TEST(server_tells_who_holds_a_row_that_it_has_gone) {
  const wire::ParamSetLayout layout = evicting_layout({.unseen_steps = 1});
  Evicting world(layout);
  world.update({{1, 1.0f}, {2, 1.0f}});
  const auto holding = [&](uint64_t since, const std::vector<RowGradient>& rows) {
    wire::PushHeader header;
    header.round = world.round++;
    header.configs = layout.configs;
    const wire::TableRef table{0, rows.size(), 4, 0, false, 0};
    wire::HoldRefs holds;
    holds.since = since;
    holds.tables = {{0, 3, 4, 0, false, 0}};
    wire::FilledPush push = wire::layout_push(header, {}, std::span(&table, 1), nullptr, &holds);
    for (size_t i = 0; i < rows.size(); ++i) {
      push.keys[0][i] = rows[i].key;
      std::fill_n(push.rows[0] + i * 4, 4, rows[i].value);
    }
    const std::vector<int64_t> held = {1, 2, 40};
    std::copy(held.begin(), held.end(), push.held[0]);
    const wire::Frame frame =
        world[0].reply(world[0].ask(wire::FrameKind::kPush, std::move(push.payload)));
    std::map<int64_t, float> told;
    const wire::DenseView reply = world.dense(frame);
    if (reply.tables.empty()) return told;
    for (size_t i = 0; i < reply.tables[0].keys.size(); ++i) {
      told[reply.tables[0].keys[i]] = reply.tables[0].rows[i * 4];
    }
    return told;
  };
  // Read after the first update; 2 goes at the end of the second.
  const auto first = holding(1, {{1, 1.0f}});
  CHECK_EQ(first.at(1), 1.0f);
  CHECK_EQ(first.at(2), 3.0f);
  // What has changed since, with one that was made again.
  const auto second = holding(2, {{2, 1.0f}});
  CHECK_EQ(second.at(1), 3.0f);
  CHECK_EQ(second.at(2), 2.0f);
  // Rows that went before they were read are what their holder has.
  CHECK(holding(4, {{2, 1.0f}}).empty());
  // Nobody has asked for any of them.
  CHECK_EQ(world.counts(0).unknown_reads, 0u);
}

// Of an open table: keys of either sign, zeros for those without a row, and one that has lost its
// row has to be pushed as often again.
TEST(server_admits_a_key_anew_that_has_lost_its_row) {
  wire::ParamSetLayout layout = evicting_layout({.unseen_steps = 2});
  layout.tables[0].open = true;
  layout.tables[0].unknown_zeros = true;
  layout.tables[0].admission = {wire::AdmissionKind::kCount, 2, 1.0, 1024};
  Evicting world(layout);
  constexpr int64_t kKey = -(int64_t{1} << 60);
  for (int turn = 0; turn < 3; ++turn) {
    world.update({{kKey, 1.0f}});
    CHECK_EQ(world.value(kKey), 0.0f);
    world.update({{kKey, 1.0f}});
    CHECK_EQ(world.value(kKey), 2.0f);
    world.update({});
    world.update({});
    CHECK_EQ(world.value(kKey), 0.0f);
  }
  const wire::TableCounts counts = world.counts(0);
  CHECK_EQ(counts.created, 3u);
  CHECK_EQ(counts.evicted, 3u);
  CHECK_EQ(counts.filtered, 3u);
  CHECK_EQ(counts.rows, 0u);
  CHECK_EQ(counts.unknown_reads, 6u);
}

// What a row begins with again is not what gradients have moved.
TEST(server_compensates_no_gradient_for_a_row_that_has_gone) {
  for (const auto kind : {wire::Compensation::kConstant, wire::Compensation::kAdaptive}) {
    wire::ParamSetLayout layout = evicting_layout({.unseen_steps = 1});
    layout.mode = wire::UpdateMode::kOnArrival;
    layout.compensation = {kind, 0.5, kind == wire::Compensation::kAdaptive ? 0.5 : 0.0,
                           kind == wire::Compensation::kAdaptive ? 1e-3 : 0.0};
    const auto value_after = [&](bool evicted) {
      Evicting world(layout, 2);
      const auto push = [&](size_t rank, uint64_t step, const std::vector<RowGradient>& rows) {
        wire::PushHeader header;
        header.step = step;
        world[rank].reply(world.push(rank, rows, header));
      };
      if (evicted) {
        push(1, 1, {{7, 4.0f}});
        pulled_rows(world[0], layout, {7}, 1);  // -1, after an update of it
        push(1, 2, {{8, 1.0f}});                // it goes
        push(1, 3, {{9, 1.0f}});
      } else {
        pulled_rows(world[0], layout, {7}, 1);
      }
      CHECK_EQ(world.value(7), 3.0f);
      push(0, 1, {{7, 2.0f}});
      CHECK_EQ(world.value(7), 1.0f);
      // Nor does what was kept of gradients stay with the record.
      pulled_rows(world[0], layout, {7}, 2);
      push(1, 4, {{7, 1.0f}});
      push(0, 2, {{7, 1.0f}});
      return world.value(7);
    };
    CHECK_EQ(value_after(true), value_after(false));
  }
}

}  // namespace cpudist::testing
