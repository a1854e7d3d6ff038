// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Several groups of trainers over one store: inside a group rounds as everywhere, across groups
// nobody waits. Layouts of groups that a stranger could send are refused.

#include <cmath>

#include "support/patience.h"
#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

using Groups = std::vector<uint32_t>;

wire::ParamSetLayout grouped(Groups groups) {
  wire::ParamSetLayout layout = small_layout();
  layout.trainer_groups = std::move(groups);
  return layout;
}

server::ServerOptions options_for(size_t trainers) {
  return server_options(static_cast<uint32_t>(trainers));
}

struct GroupWorld : World {
  explicit GroupWorld(const Groups& groups) : World(grouped(groups), options_for(groups.size())) {}
  GroupWorld(const Groups& groups, server::ServerOptions given) : World(grouped(groups), given) {}

  uint64_t round(size_t rank, uint64_t number, double value, double clip_norm = 0.0) {
    PushSpec spec;
    spec.round = number;
    spec.clip_norm = clip_norm;
    spec.blocks[0] = {value, value, value, value};
    return push(rank, spec);
  }
  uint64_t commit(size_t rank, uint64_t number, double norm) {
    return trainers[rank]->ask(wire::FrameKind::kCommit, encode(wire::Commit{number, {norm}}));
  }
  float first() { return floats(0)[0]; }
  std::vector<uint32_t> waited_for(size_t rank) {
    Trainer& trainer = *trainers[rank];
    const auto id = trainer.plain(wire::FrameKind::kProbe, 0, Buffer(), trainer.sequence());
    return wire::decode_probe_reply(view(trainer.answer(id).payload)).waiting_for;
  }
};

}  // namespace

TEST(groups_do_not_wait_for_each_other) {
  GroupWorld world({0, 0, 1, 1});
  const auto slow = world.round(0, 0, 8);
  for (uint64_t round = 0; round < 3; ++round) {
    const auto a = world.round(2, round, 2);
    CHECK(world[2].waits(a));
    const auto b = world.round(3, round, 4);
    CHECK_EQ(world.dense(world[2].reply(a)).version.round, round + 1);
    world[3].reply(b);
  }
  CHECK(world[0].waits(slow));
  CHECK(world.waited_for(0) == std::vector<uint32_t>({1}));
  CHECK_EQ(world.first(), 10.0f - 9.0f);  // three means of 2 and 4
  const auto last = world.round(1, 0, 2);
  CHECK_EQ(world.first(), 1.0f - 5.0f);
  const wire::Frame one = world[0].reply(slow);
  const wire::Frame other = world[1].reply(last);
  CHECK_EQ(world.dense(one).version.round, 4u);  // updates of both groups
  CHECK_EQ(std::memcmp(one.payload.data(), other.payload.data(), one.payload.size()), 0);
}

TEST(groups_bring_every_block_as_others_may_have_changed_it) {
  GroupWorld world({0, 1});
  world[0].reply(world.round(0, 0, 3));
  PushSpec rows;
  rows.tables[0] = {{5, 1.0f}};
  const wire::Frame reply = world[1].reply(world.push(1, rows));
  const wire::DenseView dense = world.dense(reply);
  CHECK_EQ(dense.blocks.size(), 2u);
  float value = 0;
  std::memcpy(&value, dense.blocks[0].values.data(), sizeof value);
  CHECK_EQ(value, 7.0f);
  PushSpec nothing;  // also after a round of total weight 0
  nothing.round = 1;
  nothing.weight = 0.0;
  const wire::Frame empty = world[1].reply(world.push(1, nothing));
  CHECK_EQ(world.dense(empty).blocks.size(), 2u);
  GroupWorld alone({0, 0});  // nobody else: only what the round updated
  const auto first = alone.round(0, 0, 1);
  alone.round(1, 0, 1);
  const wire::Frame touched = alone[0].reply(first);
  CHECK_EQ(alone.dense(touched).blocks.size(), 1u);
}

TEST(groups_shrink_their_own_divisor_only) {
  GroupWorld world({0, 1, 0, 1});
  const auto waiting = world.round(0, 0, 4);
  CHECK_EQ(world[2].round_of(world[2].ask(wire::FrameKind::kLeave)), 1u);
  world[0].reply(waiting);
  CHECK_EQ(world.first(), 6.0f);  // alone now
  const auto half = world.round(1, 0, 4);
  CHECK(world[1].waits(half));
  world[3].reply(world.round(3, 0, 0));
  CHECK_EQ(world.first(), 4.0f);  // still two
}

TEST(groups_join_and_hold_their_own_rounds) {
  GroupWorld world({0, 0, 1});
  world[1].reply(world[1].ask(wire::FrameKind::kLeave));
  CHECK_EQ(world[1].round_of(join(world[1], wire::JoinStep::kHold)), 1u);
  const auto held = world.round(0, 0, 1);
  CHECK(world[0].waits(held));
  for (uint64_t round = 0; round < 4; ++round) world[2].reply(world.round(2, round, 0));
  CHECK(world[0].waits(held));
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  world[0].reply(held);
  CHECK_EQ(world.first(), 9.0f);
  const auto early = world.round(1, 1, 2);
  CHECK(world[1].waits(early));
  world[0].reply(world.round(0, 1, 4));
  world[1].reply(early);
  CHECK_EQ(world.first(), 6.0f);
  // A member that is not in this round of its group, whatever the others are at.
  world[0].error(world.round(0, 4, 1), ErrorCode::kProtocol);
}

TEST(groups_end_a_barrier_each_at_its_round) {
  GroupWorld world({0, 1, 1});
  for (uint64_t round = 0; round < 3; ++round) world[0].reply(world.round(0, round, 1));
  world[1].reply(world[1].ask(wire::FrameKind::kLeave));
  world[2].reply(world.round(2, 0, 1));
  std::vector<uint64_t> asked;
  for (auto& trainer : world.trainers) {
    asked.push_back(trainer->ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet));
  }
  const uint64_t expected[] = {3, 1, 1};
  for (size_t rank = 0; rank < 3; ++rank) {
    const wire::Frame frame = world[rank].reply(asked[rank]);
    CHECK_EQ(wire::decode_barrier_reply(view(frame.payload)).rounds[0].second, expected[rank]);
  }
  const auto member = world.round(1, 1, 1);
  CHECK(world[1].waits(member));  // both are members again
  world[2].reply(world.round(2, 1, 1));
  world[0].reply(world.round(0, 3, 1));
}

TEST(groups_update_between_the_two_phases_of_another) {
  GroupWorld world({0, 0, 1});
  const auto norm_of = [&](size_t rank, uint64_t id) {
    return wire::decode_push_norm(view(world[rank].reply(id).payload)).squared_norms.at(0);
  };
  const auto a = world.round(0, 0, 2, 2.0);
  const auto b = world.round(1, 0, 6, 2.0);
  const auto c = world.round(2, 0, 1, 100.0);
  CHECK_EQ(norm_of(0, a), 64.0);
  CHECK_EQ(norm_of(1, b), 64.0);
  CHECK_EQ(norm_of(2, c), 4.0);
  world[2].reply(world.commit(2, 0, 2.0));  // within its bound
  CHECK_EQ(world.first(), 9.0f);
  const auto commit_a = world.commit(0, 0, 8.0);
  const auto commit_b = world.commit(1, 0, 8.0);
  const float clipped = 4.0f * static_cast<float>(2.0 / (8.0 + 1e-6));
  CHECK(std::fabs(world.first() - (9.0f - clipped)) < 1e-5f);
  const wire::Frame one = world[0].reply(commit_a);
  const wire::Frame other = world[1].reply(commit_b);
  CHECK_EQ(std::memcmp(one.payload.data(), other.payload.data(), one.payload.size()), 0);
}

TEST(groups_must_agree_inside_only) {
  GroupWorld world({0, 0, 1});
  const auto with_lr = [&](size_t rank, uint64_t round, double lr) {
    PushSpec spec;
    spec.round = round;
    spec.configs = {sgd(lr)};
    spec.blocks[0] = {1, 1, 1, 1};
    return world.push(rank, spec);
  };
  world[2].reply(with_lr(2, 0, 0.5));
  const auto first = with_lr(0, 0, 1.0);
  const auto second = with_lr(1, 0, 2.0);
  world[0].error(first, ErrorCode::kConfigMismatch);
  world[1].error(second, ErrorCode::kConfigMismatch);
  world[2].reply(with_lr(2, 1, 0.25));
  CHECK_EQ(world.first(), 10.0f - 0.75f);
}

TEST(groups_all_end_with_a_lost_trainer) {
  server::ServerOptions options = options_for(3);
  options.reconnect_grace_ms = 1;
  GroupWorld world({0, 0, 1}, options);
  const auto waiting = world.round(0, 0, 1);
  world[2].disconnect();
  const TimePoint soon = Clock::now() + kPatience;
  CHECK(world[0].connection()->wait_for_answer(waiting, soon));
  world[0].error(waiting, ErrorCode::kPeerLost);
  world[1].error(world.round(1, 0, 1), ErrorCode::kPeerLost);
  CHECK_EQ(world.server.stats().pending_bytes, 0u);
}

TEST(groups_of_a_layout_are_checked) {
  const auto refused = [](Groups groups) {
    try {
      encode(grouped(std::move(groups)));
    } catch (const Error& error) {
      return error.code() == ErrorCode::kInvalidArgument;
    }
    return false;
  };
  CHECK(!refused({0, 1, 0, 2}));
  CHECK(refused({1}));        // group 0 would be empty
  CHECK(refused({0, 2, 1}));  // not in the order of lowest ranks
  CHECK(refused(Groups(65536, 0)));
  wire::ParamSetLayout on_arrival = grouped({0, 0});
  on_arrival.mode = wire::UpdateMode::kOnArrival;
  CHECK_THROWS(encode(on_arrival), Error);

  const Buffer payload = encode(grouped({0, 1, 1}));
  const auto code_with = [&](size_t offset, uint32_t value) -> uint32_t {
    Buffer changed(payload.size());
    std::memcpy(changed.data(), payload.data(), payload.size());
    std::memcpy(changed.data() + offset, &value, sizeof value);
    try {
      wire::decode_layout(view(changed));
    } catch (const Error& error) {
      return static_cast<uint32_t>(error.code());
    }
    return 0;
  };
  const auto protocol = static_cast<uint32_t>(ErrorCode::kProtocol);
  const size_t count = 32;  // after four counts, the bound on staleness, the flag of deltas
  const size_t groups = count + 8;
  CHECK_EQ(code_with(groups + 4, 0), 0u);
  CHECK_EQ(code_with(groups, 1), protocol);
  CHECK_EQ(code_with(groups + 8, 7), protocol);
  CHECK_EQ(code_with(groups + 12, 1), protocol);  // padding
  CHECK_EQ(code_with(count + 4, 1), protocol);    // zero
  CHECK_EQ(code_with(count, 0xffffffffu), protocol);
  CHECK_EQ(code_with(count, 1u << 30), protocol);
  CHECK_EQ(code_with(12, 1), protocol);  // updates on arrival
}

TEST(groups_fit_the_run_and_each_other) {
  const auto open = [](Trainer& trainer, uint32_t trainers, Groups groups) {
    trainer.reply(trainer.hello(trainers, 1), wire::FrameKind::kHello);
    return trainer.ask(wire::FrameKind::kOpen, encode(grouped(std::move(groups))));
  };
  for (const Groups& groups : {Groups{0}, Groups{0, 1, 1}}) {
    server::Server server(server_options(2));
    Trainer first(server, 0);
    const auto text = first.error(open(first, 2, groups), ErrorCode::kInvalidArgument);
    CHECK(contains(text, "the run has 2"));
  }
  const std::pair<Groups, const char*> others[] = {
      {Groups{0, 1}, "trainer 1, group: 0 against 1"},
      {Groups{}, "groups of trainers: given against none"},
  };
  for (const auto& [groups, part] : others) {
    server::Server server(server_options(2));
    Trainer first(server, 0);
    Trainer second(server, 1);
    first.reply(open(first, 2, {0, 0}));
    CHECK(contains(second.error(open(second, 2, groups), ErrorCode::kConfigMismatch), part));
  }
}

}  // namespace cpudist::testing
