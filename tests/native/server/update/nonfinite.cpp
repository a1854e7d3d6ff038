// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Gradients that are infinite or NaN: nothing of them is applied, and who waits is told.

#include <limits>
#include <string>

#include "support/remote_fixture.h"

namespace cpudist::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

wire::ParamSetLayout layout_of(wire::UpdateMode mode) {
  wire::ParamSetLayout layout = remote_layout();
  layout.mode = mode;
  return layout;
}

server::ServerOptions options_of(uint32_t trainers, server::NonFinite nonfinite) {
  server::ServerOptions options = server_options(trainers);
  options.nonfinite = nonfinite;
  return options;
}

struct Checked : World {
  Checked(wire::UpdateMode mode, uint32_t count,
          server::NonFinite nonfinite = server::NonFinite::kRaise)
      : World(layout_of(mode), options_of(count, nonfinite), false) {
    testing::make_ready(*this);
  }
  uint64_t give(size_t rank, float value, uint64_t round = 0) {
    wire::PushHeader header;
    header.round = round;
    return trainers[rank]->ask(wire::FrameKind::kPush,
                               remote_push(*this, header, {{3, 1.0f}, {7, value}}));
  }
  std::vector<uint8_t> values() { return fetched(*this, {3, 7}); }
};

}  // namespace

TEST(nonfinite_round_is_told_to_all_of_its_trainers_and_the_next_one_is_whole) {
  Checked world(wire::UpdateMode::kRounds, 2);
  const auto before = world.values();
  const uint64_t bad = world.give(1, kNan);  // first: nobody knows yet who else will come
  const uint64_t good = world.give(0, 1.0f);
  const std::string text = world[1].error(bad, ErrorCode::kNonFinite);
  CHECK(contains(text, "trainer 1 pushed a gradient of table emb that is NaN in the row of id 7"));
  CHECK(contains(text, "Server 0 applied nothing of it"));
  CHECK_EQ(world[0].error(good, ErrorCode::kNonFinite), text);
  CHECK(world.values() == before);
  CHECK_EQ(world.server.table_stats()[0].rows, 0u);
  CHECK_EQ(world.server.stats().nonfinite, 1u);

  const uint64_t first = world.give(0, 1.0f);
  const uint64_t second = world.give(1, -1.0f);
  world[0].reply(first);
  world[1].reply(second);
  CHECK_EQ(world.server.stats().rounds, 1u);
  CHECK(world.values() != before);
}

TEST(nonfinite_push_on_arrival_is_told_to_its_sender_alone) {
  Checked world(wire::UpdateMode::kOnArrival, 2);
  const auto before = world.values();
  const std::string text = world[0].error(world.give(0, -kInfinity), ErrorCode::kNonFinite);
  CHECK(contains(text, "trainer 0 pushed a gradient of table emb that is -infinity"));
  CHECK(world.values() == before);
  world[1].reply(world.give(1, 1.0f));
  world[0].reply(world.give(0, 1.0f));
  CHECK_EQ(world.server.stats().rounds, 2u);
}

TEST(nonfinite_push_that_is_skipped_is_one_without_samples) {
  // What the others do is the same as with a trainer that has no samples.
  Checked skipping(wire::UpdateMode::kRounds, 2, server::NonFinite::kSkip);
  Checked empty(wire::UpdateMode::kRounds, 2);
  const uint64_t first = skipping.give(0, 2.0f);
  skipping[1].reply(skipping.give(1, kInfinity));
  skipping[0].reply(first);
  const uint64_t second = empty.give(0, 2.0f);
  wire::PushHeader header;
  header.weight = 0;
  header.configs = empty.layout.configs;
  wire::FilledPush push = wire::layout_push(header, {}, {}, nullptr);
  empty[1].reply(empty[1].ask(wire::FrameKind::kPush, std::move(push.payload)));
  empty[0].reply(second);
  CHECK(skipping.values() == empty.values());
  CHECK_EQ(skipping.server.stats().nonfinite, 1u);
  CHECK_EQ(skipping.server.stats().rounds, 1u);
}

TEST(nonfinite_deltas_are_never_skipped) {
  wire::ParamSetLayout layout = small_layout(sgd());
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.exchanges_deltas = true;
  World world(layout, options_of(1, server::NonFinite::kSkip));
  PushSpec spec;
  spec.configs = layout.configs;
  spec.blocks[1] = {0.0, static_cast<double>(kNan), 0.0};
  const uint64_t request = world.push(0, spec);
  CHECK(contains(world[0].error(request, ErrorCode::kNonFinite), " that is NaN at element 1"));
}

TEST(nonfinite_is_applied_where_nobody_looks) {
  Checked world(wire::UpdateMode::kOnArrival, 1, server::NonFinite::kApply);
  world[0].reply(world.give(0, kNan));
  CHECK_EQ(world.server.stats().nonfinite, 0u);
  CHECK(std::isnan(pulled_rows(world[0], world.layout, {7})[0]));
}

}  // namespace cpudist::testing
