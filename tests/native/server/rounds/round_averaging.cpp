// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The arithmetic of rounds: averaging, clipping, step counts, and bits that depend neither on
// threads nor on arrival.

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

float weight_of(int64_t key) { return initial_weight(key, 0); }

}  // namespace

TEST(round_equal_weights_are_the_mean_over_members) {
  World world(3);
  PushSpec a, b, c;
  a.blocks[0] = {3, 0, 0, 1};
  a.tables[0] = {{5, 3.0f}, {6, 1.0f}};
  b.blocks[0] = {0, 6, 0, 1};
  b.tables[0] = {{6, 2.0f}};
  c.tables[0] = {};  // a section without rows, and none for the block: zero gradients of weight 1
  const auto first = world.push(0, a);
  CHECK(world[0].waits(first));
  const auto second = world.push(1, b);
  const auto third = world.push(2, c);
  const float scale = static_cast<float>(1.0 / 3.0);
  const auto w = world.floats(0);
  CHECK_EQ(w[0], 10 - 3.0f * scale);
  CHECK_EQ(w[1], 11 - 6.0f * scale);
  CHECK_EQ(w[2], 12.0f);
  CHECK_EQ(w[3], 13 - 2.0f * scale);
  CHECK_EQ(world.row(5)[0], weight_of(5) - 3.0f * scale);
  CHECK_EQ(world.row(6)[0], weight_of(6) - 3.0f * scale);
  CHECK_EQ(world.row(7)[0], weight_of(7));
  for (const auto& [rank, id] : {std::pair{0, first}, {1, second}, {2, third}}) {
    const wire::Frame reply = world[rank].reply(id);
    const wire::DenseView dense = world.dense(reply);
    CHECK_EQ(dense.version.round, 1u);
    CHECK_EQ(dense.blocks.size(), 1u);
    CHECK_EQ(dense.blocks[0].block, 0u);
    CHECK_EQ(std::memcmp(dense.blocks[0].values.data(), w.data(), 16), 0);
  }
  CHECK(world.doubles(1) == std::vector<double>({10, 11, 12}));
}

TEST(round_unequal_weights_are_a_weighted_mean) {
  World world(2);
  PushSpec a, b;
  a.weight = 3;
  a.blocks[1] = {1, 2, 0.5};
  a.tables[0] = {{5, 1.0f}, {9, 1.0f}};
  b.weight = 1;
  b.blocks[1] = {5, -2, 0};
  b.tables[0] = {{9, 4.0f}};
  world.push(0, a);
  world.push(1, b);
  CHECK(world.doubles(1) == std::vector<double>({10 - 2.0, 11 - 1.0, 12 - 0.375}));
  CHECK_EQ(world.row(5)[0], weight_of(5) - 0.75f);
  CHECK_EQ(world.row(9)[0], weight_of(9) - 1.75f);
}

TEST(round_weight_zero_contributes_nothing_not_even_nan) {
  World world(2);
  PushSpec a, b;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  a.weight = 0;
  a.blocks[0] = {nan, nan, nan, nan};
  a.tables[0] = {{5, nan}, {6, nan}};
  b.weight = 4;
  b.blocks[0] = {1, 2, 3, 4};
  b.tables[0] = {{5, 1.0f}};
  world.push(0, a);
  world.push(1, b);
  CHECK(world.floats(0) == std::vector<float>({9, 9, 9, 9}));
  CHECK_EQ(world.row(5)[0], weight_of(5) - 1);
  CHECK_EQ(world.row(6)[0], weight_of(6));
}

TEST(round_of_total_weight_zero_moves_only_its_number) {
  kernels::OptimizerConfig config = sgd();
  config.momentum = 0.5;
  World world(small_layout(config), server_options(2));
  PushSpec spec;
  spec.configs = {config};
  spec.weight = 0;
  spec.blocks[0] = {1, 1, 1, 1};
  spec.tables[0] = {{5, 1.0f}};
  const auto first = world.push(0, spec);
  world.push(1, spec);
  wire::Frame reply = world[0].reply(first);
  CHECK_EQ(world.dense(reply).version.round, 1u);
  CHECK(world.dense(reply).blocks.empty());
  spec.round = 1;
  spec.clip_norm = 1;
  const auto second = world.push(0, spec);
  world.push(1, spec);
  CHECK_EQ(wire::decode_push_norm(view(world[0].reply(second).payload)).squared_norms.at(0), 0.0);
  reply = world[0].reply(world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{1, {0.0}})));
  CHECK_EQ(world.dense(reply).version.round, 2u);
  CHECK(world.dense(reply).blocks.empty());
  CHECK(world.floats(0) == std::vector<float>({10, 11, 12, 13}));
  CHECK_EQ(world.row(5)[0], weight_of(5));
  CHECK_EQ(world.server.stats().rounds, 2u);
}

TEST(round_of_one_pusher_takes_its_gradient_as_it_is) {
  World world(1);
  PushSpec spec;
  spec.weight = 0.3;
  spec.blocks[1] = {0.1, 1e-300, 3};
  spec.tables[0] = {{5, 0.1f}, {40, 0.7f}, {6, -2.0f}};
  world.push(0, spec);
  CHECK(world.doubles(1) == std::vector<double>({10 - 0.1, 11 - 1e-300, 9}));
  CHECK_EQ(world.row(5)[3], initial_weight(5, 3) - 0.1f);
  CHECK_EQ(world.row(40)[0], weight_of(40) - 0.7f);
  CHECK_EQ(world.row(6)[0], weight_of(6) + 2.0f);
}

TEST(round_clip_value_clamps_the_average) {
  World world(2);
  PushSpec a, b;
  a.clip_value = b.clip_value = 0.5;
  a.blocks[0] = {4, -4, 0.5, 0};
  b.blocks[0] = {0, 0, 0.25, 0};
  a.tables[0] = {{5, 8.0f}};
  b.tables[0] = {{5, -7.5f}, {6, -9.0f}};
  world.push(0, a);
  world.push(1, b);
  CHECK(world.floats(0) == std::vector<float>({9.5f, 11.5f, 11.625f, 13}));
  CHECK_EQ(world.row(5)[0], weight_of(5) - 0.25f);
  CHECK_EQ(world.row(6)[0], weight_of(6) + 0.5f);
}

TEST(round_clip_norm_takes_two_phases) {
  World world(2);
  PushSpec a, b;
  a.clip_norm = b.clip_norm = 1.0;
  a.blocks[0] = {6, 0, 0, 0};
  b.tables[0] = {{5, 8.0f}};  // averages: 3 in the block, a row of four times 4
  const auto first = world.push(0, a);
  const auto second = world.push(1, b);
  const wire::PushNorm norm = wire::decode_push_norm(view(world[0].reply(first).payload));
  CHECK_EQ(norm.round, 0u);
  CHECK_EQ(norm.squared_norms.at(0), 9.0 + 4 * 16.0);
  CHECK_EQ(wire::decode_push_norm(view(world[1].reply(second).payload)).squared_norms.at(0), 73.0);
  CHECK(world.floats(0) == std::vector<float>({10, 11, 12, 13}));

  const double total = std::sqrt(2 * 73.0);  // another server has as much
  const auto commit = world[1].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {total}}));
  const auto scale = static_cast<float>(1.0 / (total + 1e-6));
  CHECK_EQ(world.floats(0)[0], 10 - 3.0f * scale);
  CHECK_EQ(world.row(5)[0], weight_of(5) - 4.0f * scale);
  CHECK_EQ(world.dense(world[1].reply(commit)).version.round, 1u);
  const auto other = world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {total}}));
  const wire::Frame late = world[0].reply(other);
  CHECK_EQ(world.dense(late).blocks.size(), 1u);
  CHECK_EQ(world.floats(0)[0], 10 - 3.0f * scale);
}

TEST(round_clip_each_scales_every_tensor_by_its_own_norm_over_all_servers) {
  World world(2);
  PushSpec a, b;
  a.clip_norm = b.clip_norm = 1.0;
  a.clip_each = b.clip_each = true;
  a.blocks[0] = {6, 0, 0, 0};
  a.blocks[1] = {0, 0, 0.5};
  b.tables[0] = {{5, 8.0f}};  // averages: 3 and 0.25 in the blocks, a row of four times 4
  const auto first = world.push(0, a);
  world.push(1, b);
  const auto told = wire::decode_push_norm(view(world[0].reply(first).payload), 3);
  CHECK(told.squared_norms == (std::vector<double>{9.0, 0.0625, 64.0}));
  CHECK(world.floats(0) == std::vector<float>({10, 11, 12, 13}));

  // Another server has 16 of the first parameter, and rows of the table.
  const std::vector<double> norms{5.0, 0.25, 10.0};
  const auto commit = world[1].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, norms}));
  CHECK_EQ(world.floats(0)[0], 10 - 3.0f * static_cast<float>(1.0 / (5.0 + 1e-6)));
  CHECK_EQ(world.doubles(1)[2], 12 - 0.25);
  CHECK_EQ(world.row(5)[0], weight_of(5) - 4.0f * static_cast<float>(1.0 / (10.0 + 1e-6)));
  CHECK_EQ(world.dense(world[1].reply(commit)).version.round, 1u);
  std::vector<double> others = norms;
  others[1] = 0.5;
  world[0].error(world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, others})),
                 ErrorCode::kProtocol);
  world[0].reply(world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, norms})));
}

TEST(round_clip_each_spreads_what_is_no_number_in_its_tensor_only) {
  server::ServerOptions options = server_options(1);
  options.nonfinite = server::NonFinite::kApply;
  World world(small_layout(), options);
  PushSpec spec;
  spec.clip_norm = 1.0;
  spec.clip_each = true;
  spec.blocks[0] = {NAN, 1, 0, 0};
  spec.blocks[1] = {0.5, 0, 0};
  const auto push = world.push(0, spec);
  const auto told = wire::decode_push_norm(view(world[0].reply(push).payload), 3);
  CHECK(std::isnan(told.squared_norms[0]));
  world[0].reply(world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {NAN, 0.5, 0.0}})));
  CHECK(std::isnan(world.floats(0)[1]));
  CHECK_EQ(world.doubles(1)[0], 9.5);
}

TEST(round_clip_norm_leaves_small_gradients_alone) {
  World world(1);
  PushSpec spec;
  spec.clip_norm = 100;
  spec.blocks[0] = {0.1, 0, 0, 0};
  world.push(0, spec);
  world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {0.1}}));
  CHECK_EQ(world.floats(0)[0], 10 - 0.1f);
}

TEST(round_commit_errors) {
  World world(2);
  PushSpec spec;
  spec.clip_norm = 1;
  spec.blocks[0] = {1, 1, 1, 1};
  const auto early = world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {1.0}}));
  world[0].error(early, ErrorCode::kProtocol);
  world.push(0, spec);
  world.push(1, spec);
  const auto wrong = world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{3, {1.0}}));
  world[0].error(wrong, ErrorCode::kProtocol);
  world[0].reply(world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {1.0}})));
  const auto other = world[1].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {2.0}}));
  world[1].error(other, ErrorCode::kProtocol);
  const auto twice = world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {1.0}}));
  world[0].error(twice, ErrorCode::kProtocol);
}

TEST(round_table_step_counts_rounds_with_a_section) {
  kernels::OptimizerConfig config;
  config.kind = kernels::OptimizerKind::kAdagrad;
  config.lr = 1.0;
  config.lr_decay = 1.0;
  config.eps = 1e-10;
  World world(small_layout(config), server_options(1));
  PushSpec spec;
  spec.configs = {config};
  world.push(0, spec);  // no section: no step
  spec.round = 1;
  spec.tables[0] = {};  // a section without rows: a step
  world.push(0, spec);
  spec.round = 2;
  spec.tables[0] = {{5, 1.0f}};
  world.push(0, spec);  // step 2: lr / (1 + 1)
  CHECK_NEAR(world.row(5)[0], weight_of(5) - 0.5, 1e-6);
  wire::FetchRequest fetch;
  const std::vector<int64_t> keys = {5, 6};
  fetch.keys = keys;
  fetch.blocks = true;
  const wire::Frame frame =
      world[0].reply(world[0].plain(wire::FrameKind::kFetchState, 0, encode(fetch)));
  const wire::StoreView stored = wire::decode_store(view(frame.payload), world.layout);
  CHECK_EQ(stored.tables.at(0).step, 2u);
  CHECK_EQ(stored.tables[0].counts[0], 1u);
  CHECK_EQ(stored.tables[0].counts[1], 0u);
  CHECK_EQ(stored.tables[0].state[0], 1.0f);
  CHECK_EQ(stored.blocks.at(0).step, 0u);
}

TEST(round_state_of_one_parameter_is_fetched_alone) {
  World world(small_layout(), server_options(1));
  wire::FetchRequest fetch;
  fetch.blocks = true;
  fetch.parameter = 1;
  const wire::Frame frame =
      world[0].reply(world[0].plain(wire::FrameKind::kFetchState, 0, encode(fetch)));
  const wire::StoreView stored = wire::decode_store(view(frame.payload), world.layout);
  CHECK_EQ(stored.blocks.size(), 1u);
  CHECK_EQ(stored.blocks[0].block, 1u);
}

TEST(round_rows_of_dense_optimizers_count_their_own_steps) {
  kernels::OptimizerConfig config;
  config.kind = kernels::OptimizerKind::kAdam;
  config.lr = 0.5;
  config.beta1 = 0.9;
  config.beta2 = 0.999;
  config.eps = 1e-12;
  World world(small_layout(config), server_options(1));
  PushSpec spec;
  spec.configs = {config};
  for (spec.round = 0; spec.round < 4; ++spec.round) {
    // Row 6 comes first in round 3: its step is 1, and the first Adam step has length lr.
    spec.tables[0] = {{5, 2.0f}};
    if (spec.round == 3) spec.tables[0].push_back({6, 3.0f});
    world.push(0, spec);
  }
  CHECK_NEAR(world.row(6)[0], weight_of(6) - 0.5, 1e-4);
  CHECK_NEAR(world.row(5)[0], weight_of(5) - 2.0, 1e-3);
}

TEST(round_block_step_counts_its_own_updates) {
  kernels::OptimizerConfig config = sgd();
  config.momentum = 0.5;
  World world(small_layout(config), server_options(1));
  PushSpec spec;
  spec.configs = {config};
  world.push(0, spec);
  spec.round = 1;
  spec.blocks[0] = {1, 1, 1, 1};
  world.push(0, spec);  // the first update of the block: the buffer becomes the gradient
  CHECK_EQ(world.floats(0)[0], 9.0f);
  spec.round = 2;
  world.push(0, spec);
  CHECK_EQ(world.floats(0)[0], 7.5f);
}

namespace {

constexpr int64_t kTrainedRows = kInstrumented ? 600 : 3000;

// Three trainers, four rounds of random gradients; the bytes of everything at the end.
std::vector<float> train(uint32_t threads, const std::vector<size_t>& order, double clip_norm,
                         bool clip_each) {
  wire::ParamSetLayout layout = small_layout();
  layout.tables[0].rows = kTrainedRows;
  layout.tables.push_back({"other", 500, 3, 0});
  layout.configs[0].kind = kernels::OptimizerKind::kAdagrad;
  layout.configs[0].lr = 0.1;
  layout.configs[0].eps = 1e-10;
  World world(layout, server_options(3, threads));
  std::mt19937 random(9);
  std::uniform_real_distribution<float> gradient(-1, 1);
  for (uint64_t round = 0; round < 4; ++round) {
    std::vector<PushSpec> specs(3);
    for (PushSpec& spec : specs) {
      spec.round = round;
      spec.configs = layout.configs;
      spec.clip_norm = clip_norm;
      spec.clip_each = clip_each;
      spec.weight = 1 + static_cast<double>(random() % 3);
      spec.blocks[0] = {gradient(random), gradient(random), gradient(random), gradient(random)};
      for (int64_t key = 0; key < kTrainedRows; ++key) {
        if (random() % 3 != 0) spec.tables[0].push_back({key, gradient(random)});
      }
      for (int64_t key = 499; key >= 0; key -= 2) spec.tables[1].push_back({key, gradient(random)});
    }
    uint64_t last = 0;
    for (const size_t rank : order) last = world.push(rank, specs[rank]);
    if (clip_norm == 0) continue;
    const auto norm =
        wire::decode_push_norm(view(world[order[2]].reply(last).payload), clip_each ? 4 : 1);
    wire::Commit commit{round, {}};
    for (const double squared : norm.squared_norms) commit.norms.push_back(std::sqrt(squared));
    for (const size_t rank : order)
      world[rank].reply(world[rank].ask(wire::FrameKind::kCommit, encode(commit)));
  }
  std::vector<float> all = world.floats(0);
  for (int64_t key = 0; key < kTrainedRows; ++key) {
    const auto row = world.row(key);
    all.insert(all.end(), row.begin(), row.end());
  }
  for (int64_t key = 0; key < 500; ++key) {
    const auto row = world.row(key, 1);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

}  // namespace

TEST(round_bits_depend_neither_on_threads_nor_on_arrival) {
  for (const auto& [clip_norm, each] :
       std::vector<std::pair<double, bool>>{{0.0, false}, {0.75, false}, {0.75, true}}) {
    const auto expected = train(1, {0, 1, 2}, clip_norm, each);
    std::vector<size_t> order = {0, 1, 2};
    do {
      for (const uint32_t threads : {1u, 4u}) {
        const auto found = train(threads, order, clip_norm, each);
        CHECK_EQ(found.size(), expected.size());
        CHECK_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)), 0);
      }
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST(round_duplicate_keys_of_a_section_are_summed) {
  World world(1);
  PushSpec spec;
  spec.tables[0] = {{5, 1.0f}, {5, 2.0f}};
  world.push(0, spec);
  CHECK_EQ(world.row(5)[0], weight_of(5) - 3.0f);
}

}  // namespace cpudist::testing
