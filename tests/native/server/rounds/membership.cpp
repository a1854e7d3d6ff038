// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Leaving, joining, barriers and goodbyes, on one server and on two.

#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

PushSpec of_round(uint64_t round, double value = 3.0) {
  PushSpec spec;
  spec.round = round;
  spec.blocks[0] = {value, value, value, value};
  return spec;
}

// Server 1 of two: owns rows, no blocks.
server::ServerOptions second_server(uint32_t trainers) {
  server::ServerOptions options = server_options(trainers);
  options.server_count = 2;
  options.shard_id = 1;
  return options;
}
server::ServerOptions first_server(uint32_t trainers) {
  server::ServerOptions options = server_options(trainers);
  options.server_count = 2;
  return options;
}

}  // namespace

TEST(server_leave_completes_a_round_and_shrinks_the_divisor) {
  World world(3);
  const auto first = world.push(0, of_round(0));
  const auto second = world.push(1, of_round(0));
  CHECK_EQ(world[2].round_of(world[2].ask(wire::FrameKind::kLeave)), 1u);
  CHECK_EQ(world.dense(world[0].reply(first)).version.round, 1u);
  world[1].reply(second);
  CHECK_EQ(world.floats(0)[0], 7.0f);
  world[2].error(world.push(2, of_round(1)), ErrorCode::kProtocol);
  world[1].reply(world[1].ask(wire::FrameKind::kLeave));
  world[0].reply(world.push(0, of_round(1)));  // alone now
  CHECK_EQ(world.floats(0)[0], 4.0f);
  CHECK_EQ(world[2].round_of(world[2].ask(wire::FrameKind::kLeave)), 2u);  // again is harmless
}

TEST(server_uneven_trainers_leave_one_by_one) {
  World world(3);
  uint64_t round = 0;
  const std::vector<uint64_t> steps = {5, 2, 3};
  for (; round < 5; ++round) {
    std::vector<std::pair<size_t, uint64_t>> asked;
    for (size_t rank = 0; rank < 3; ++rank) {
      if (round < steps[rank]) asked.emplace_back(rank, world.push(rank, of_round(round)));
      if (round == steps[rank]) world[rank].ask(wire::FrameKind::kLeave);
    }
    for (const auto& [rank, id] : asked)
      CHECK_EQ(world.dense(world[rank].reply(id)).version.round, round + 1);
  }
  CHECK_EQ(world.floats(0)[0], 10.0f - 15.0f);
}

TEST(server_barrier_releases_rounds_and_restores_members) {
  World world(3);
  const auto first = world[0].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  const auto push1 = world.push(1, of_round(0));
  const auto push2 = world.push(2, of_round(0));
  world[1].reply(push1);  // trainer 0 has left the rounds
  world[2].reply(push2);
  const auto second = world[1].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  CHECK(world[0].waits(first) && world[1].waits(second));
  const auto third = world[2].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  for (const auto& [rank, id] : {std::pair{0, first}, {1, second}, {2, third}}) {
    const auto reply = wire::decode_barrier_reply(view(world[rank].reply(id).payload));
    CHECK_EQ(reply.rounds.size(), 1u);
    CHECK_EQ(reply.rounds[0].second, 1u);
  }
  const auto a = world.push(0, of_round(1));
  world.push(1, of_round(1));
  CHECK(world[0].waits(a));
  world.push(2, of_round(1));
  CHECK_EQ(world.dense(world[0].reply(a)).version.round, 2u);
}

TEST(server_barrier_does_not_wait_for_a_goodbye) {
  World world(2);
  const auto barrier = world[0].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  CHECK(world[0].waits(barrier));
  world[1].reply(world[1].ask(wire::FrameKind::kGoodbye, Buffer(), wire::kNoParamSet));
  world[0].reply(barrier);
  world[0].reply(world.push(0, of_round(0)));
}

TEST(server_goodbye_of_all_ends_wait_done) {
  World world(2);
  const auto push = world.push(0, of_round(0));
  CHECK(!world.server.wait_done(Clock::now()));
  world[1].reply(world[1].ask(wire::FrameKind::kGoodbye, Buffer(), wire::kNoParamSet));
  world[0].reply(push);
  world[1].disconnect();
  CHECK(!world.server.wait_done(Clock::now()));
  world[0].reply(world[0].ask(wire::FrameKind::kGoodbye, Buffer(), wire::kNoParamSet));
  CHECK(world.server.wait_done(Clock::now()));
  CHECK_EQ(world.server.stats().rows, 0u);
}

TEST(server_join_is_held_on_server_zero_until_release) {
  World zero(small_layout(), first_server(2));
  World one(small_layout(), second_server(2));
  for (World* world : {&zero, &one}) (*world)[1].reply((*world)[1].ask(wire::FrameKind::kLeave));

  const auto hold = join(zero[1], wire::JoinStep::kHold);
  CHECK_EQ(zero[1].round_of(hold), 1u);
  const auto push_zero = zero.push(0, of_round(0));
  PushSpec empty;
  const auto push_one = one.push(0, empty);
  CHECK(zero[0].waits(push_zero));  // held
  one[0].reply(push_one);           // round 0 is applied there; round 1 cannot be without server 0
  CHECK_EQ(one[1].round_of(join(one[1], wire::JoinStep::kMember, 1)), 1u);
  zero[1].reply(join(zero[1], wire::JoinStep::kRelease));
  CHECK_EQ(zero.dense(zero[0].reply(push_zero)).version.round, 1u);
  CHECK_EQ(zero.floats(0)[0], 7.0f);  // trainer 1 had no part in round 0

  const auto next = zero.push(0, of_round(1, 4.0));
  CHECK(zero[0].waits(next));
  zero[1].reply(zero.push(1, of_round(1, 0.0)));
  CHECK_EQ(zero.floats(0)[0], 5.0f);
  empty.round = 1;
  const auto last = one.push(0, empty);
  CHECK(one[0].waits(last));
  one[1].reply(one.push(1, empty));
  one[0].reply(last);
}

TEST(server_join_before_its_round_waits_for_it) {
  World one(small_layout(), second_server(2));
  one[1].reply(one[1].ask(wire::FrameKind::kLeave));
  one[1].reply(join(one[1], wire::JoinStep::kMember, 1));
  PushSpec spec;
  one[0].reply(one.push(0, spec));  // round 0 without trainer 1
  spec.round = 1;
  CHECK(one[0].waits(one.push(0, spec)));
}

TEST(server_keeps_the_push_of_a_joining_trainer_for_its_round) {
  World world(2);
  world[1].reply(world[1].ask(wire::FrameKind::kLeave));
  CHECK_EQ(world[1].round_of(join(world[1], wire::JoinStep::kHold)), 1u);
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  const auto early = world.push(1, of_round(1));  // round 0 is not over
  CHECK(world[1].waits(early));
  world[0].reply(world.push(0, of_round(0)));
  CHECK_EQ(world.floats(0)[0], 7.0f);  // round 0 without it
  CHECK(world[1].waits(early));
  world[0].reply(world.push(0, of_round(1)));
  CHECK_EQ(world.dense(world[1].reply(early)).version.round, 2u);
  CHECK_EQ(world.floats(0)[0], 4.0f);
}

TEST(server_applies_an_early_push_when_the_others_leave) {
  World world(2);
  world[1].reply(world[1].ask(wire::FrameKind::kLeave));
  CHECK_EQ(world[1].round_of(join(world[1], wire::JoinStep::kHold)), 1u);
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  const auto early = world.push(1, of_round(1));
  world[0].reply(world[0].ask(wire::FrameKind::kLeave));
  CHECK_EQ(world.dense(world[1].reply(early)).version.round, 2u);
  CHECK_EQ(world.floats(0)[0], 7.0f);
}

TEST(server_join_with_no_members_starts_at_once) {
  World world(2);
  world[0].ask(wire::FrameKind::kLeave);
  world[1].ask(wire::FrameKind::kLeave);
  CHECK_EQ(world[1].round_of(join(world[1], wire::JoinStep::kHold)), 0u);
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  world[1].reply(world.push(1, of_round(0)));
  CHECK_EQ(world[0].round_of(join(world[0], wire::JoinStep::kHold)), 2u);
  world[0].reply(join(world[0], wire::JoinStep::kRelease));
}

// Else the second would be the only one that another server knows of, which would go on to its
// round and apply that without the first.
TEST(server_joins_of_two_with_no_members_come_one_after_the_other) {
  World zero(small_layout(), first_server(2));
  World one(small_layout(), second_server(2));
  for (World* world : {&zero, &one}) {
    for (size_t rank : {0, 1}) (*world)[rank].reply((*world)[rank].ask(wire::FrameKind::kLeave));
  }
  CHECK_EQ(zero[0].round_of(join(zero[0], wire::JoinStep::kHold)), 0u);
  const auto second = join(zero[1], wire::JoinStep::kHold);
  CHECK(zero[1].waits(second));
  CHECK_EQ(one[0].round_of(join(one[0], wire::JoinStep::kMember, 0)), 0u);
  zero[0].reply(join(zero[0], wire::JoinStep::kRelease));
  CHECK_EQ(zero[1].round_of(second), 1u);
  CHECK_EQ(one[1].round_of(join(one[1], wire::JoinStep::kMember, 1)), 1u);
  zero[1].reply(join(zero[1], wire::JoinStep::kRelease));
  for (World* world : {&zero, &one}) {
    PushSpec spec;
    (*world)[0].reply(world->push(0, spec));
    spec.round = 1;
    const auto waits = world->push(0, spec);
    CHECK((*world)[0].waits(waits));
    (*world)[1].reply(world->push(1, spec));
    (*world)[0].reply(waits);
  }
}

// The first to join may push its round before any answer of server 0: where the others leave,
// another server applies it at once.
TEST(server_join_names_a_round_behind_those_of_who_is_joining) {
  World zero(small_layout(), first_server(3));
  World one(small_layout(), second_server(3));
  for (World* world : {&zero, &one}) {
    for (size_t rank : {0, 1}) (*world)[rank].reply((*world)[rank].ask(wire::FrameKind::kLeave));
  }
  CHECK_EQ(zero[0].round_of(join(zero[0], wire::JoinStep::kHold)), 1u);
  CHECK_EQ(one[0].round_of(join(one[0], wire::JoinStep::kMember, 1)), 1u);
  zero[0].reply(join(zero[0], wire::JoinStep::kRelease));
  CHECK_EQ(zero[1].round_of(join(zero[1], wire::JoinStep::kHold)), 2u);
  PushSpec spec;
  spec.round = 1;
  const auto held = zero.push(0, spec);
  CHECK(zero[0].waits(held));
  one[2].reply(one[2].ask(wire::FrameKind::kLeave));
  one[0].reply(one.push(0, spec));
  CHECK_EQ(one[1].round_of(join(one[1], wire::JoinStep::kMember, 2)), 2u);
  zero[1].reply(join(zero[1], wire::JoinStep::kRelease));
  zero[2].reply(zero[2].ask(wire::FrameKind::kLeave));
  zero[0].reply(held);
  spec.round = 2;
  for (World* world : {&zero, &one}) {
    const auto early = world->push(1, spec);
    CHECK((*world)[1].waits(early));
    (*world)[0].reply(world->push(0, spec));
    (*world)[1].reply(early);
  }
}

// Who waits to join goes on when the one before it does, and is told of its loss.
TEST(server_join_behind_one_that_goes_is_not_held_for_ever) {
  World world(3);
  for (size_t rank : {0, 1, 2}) world[rank].reply(world[rank].ask(wire::FrameKind::kLeave));
  world[0].reply(join(world[0], wire::JoinStep::kHold));
  const auto second = join(world[1], wire::JoinStep::kHold);
  CHECK(world[1].waits(second));
  world[0].reply(world[0].ask(wire::FrameKind::kGoodbye, Buffer(), wire::kNoParamSet));
  CHECK_EQ(world[1].round_of(second), 0u);
  const auto third = join(world[2], wire::JoinStep::kHold);
  CHECK(world[2].waits(third));
  world[1].disconnect();
  CHECK(world[2].comes(third));
  CHECK(contains(world[2].error(third, ErrorCode::kPeerLost), "trainer 1"));
}

TEST(server_join_survives_the_last_member_leaving) {
  World world(2);
  world[1].ask(wire::FrameKind::kLeave);
  CHECK_EQ(world[1].round_of(join(world[1], wire::JoinStep::kHold)), 1u);
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  CHECK_EQ(world[0].round_of(world[0].ask(wire::FrameKind::kLeave)),
           1u);  // nobody is left for round 0
  world[1].reply(world.push(1, of_round(1)));
}

TEST(server_join_errors) {
  World world(2);
  world[0].error(join(world[0], wire::JoinStep::kHold), ErrorCode::kProtocol);
  world[0].error(join(world[0], wire::JoinStep::kRelease), ErrorCode::kProtocol);
  world[1].ask(wire::FrameKind::kLeave);
  world.push(0, of_round(0));
  world[1].error(join(world[1], wire::JoinStep::kMember, 0), ErrorCode::kProtocol);
  World one(small_layout(), second_server(1));
  one[0].ask(wire::FrameKind::kLeave);
  one[0].error(join(one[0], wire::JoinStep::kHold), ErrorCode::kInvalidArgument);
}

TEST(server_hold_delays_a_commit) {
  World world(2);
  world[1].ask(wire::FrameKind::kLeave);
  PushSpec spec = of_round(0);
  spec.clip_norm = 1e9;
  world[0].reply(world.push(0, spec));
  join(world[1], wire::JoinStep::kHold);
  const auto commit = world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {6.0}}));
  CHECK(world[0].waits(commit));
  join(world[1], wire::JoinStep::kRelease);
  CHECK_EQ(world.dense(world[0].reply(commit)).version.round, 1u);
}

}  // namespace cpudist::testing
