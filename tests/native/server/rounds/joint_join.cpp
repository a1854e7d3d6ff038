// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Joins that wait until all others are at one step, and joins at the current round.

#include <limits>

#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

PushSpec push_for(uint64_t round, double value = 3.0) {
  PushSpec spec;
  spec.round = round;
  spec.blocks[0] = {value, value, value, value};
  return spec;
}

void leave_of(World& world, std::initializer_list<size_t> ranks) {
  for (const size_t rank : ranks) world[rank].reply(world[rank].ask(wire::FrameKind::kLeave));
}

}  // namespace

TEST(server_joint_join_is_answered_once_all_others_have_pushed) {
  World world(3);
  leave_of(world, {2});
  const auto hold = join(world[2], wire::JoinStep::kHoldPushed);
  CHECK(world[2].waits(hold));
  const auto first = world.push(0, push_for(0));
  CHECK(world[2].waits(hold));
  const auto second = world.push(1, push_for(0));
  CHECK_EQ(world[2].round_of(hold), 1u);
  CHECK(world[0].waits(first));  // held
  world[2].reply(join(world[2], wire::JoinStep::kRelease));
  world[0].reply(first);
  world[1].reply(second);
  CHECK_EQ(world.floats(0)[0], 7.0f);  // trainer 2 had no part in round 0
  const auto next = world.push(0, push_for(1));
  world.push(1, push_for(1));
  CHECK(world[0].waits(next));
  world[2].reply(world.push(2, push_for(1)));
  world[0].reply(next);
}

TEST(server_joint_join_goes_on_when_who_has_not_pushed_leaves) {
  World world(3);
  leave_of(world, {2});
  const auto push = world.push(0, push_for(0));
  const auto hold = join(world[2], wire::JoinStep::kHoldPushed);
  CHECK(world[2].waits(hold));
  leave_of(world, {1});
  CHECK_EQ(world[2].round_of(hold), 1u);
  CHECK(world[0].waits(push));
  world[2].reply(join(world[2], wire::JoinStep::kRelease));
  world[0].reply(push);
}

TEST(server_joint_join_of_who_is_alone_starts_at_once) {
  World world(2);
  leave_of(world, {0, 1});
  CHECK_EQ(world[1].round_of(join(world[1], wire::JoinStep::kHoldPushed)), 0u);
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  world[1].reply(world.push(1, push_for(0)));
}

TEST(server_joint_join_that_waits_for_who_leaves_is_alone) {
  World world(2);
  leave_of(world, {1});
  const auto hold = join(world[1], wire::JoinStep::kHoldPushed);
  CHECK(world[1].waits(hold));
  leave_of(world, {0});
  CHECK_EQ(world[1].round_of(hold), 1u);
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  world[1].reply(world.push(1, push_for(1)));
}

TEST(server_joint_join_finds_all_pushes_there_between_push_and_commit) {
  World world(2);
  leave_of(world, {1});
  PushSpec spec = push_for(0);
  spec.clip_norm = 1e9;
  world[0].reply(world.push(0, spec));
  CHECK_EQ(world[1].round_of(join(world[1], wire::JoinStep::kHoldPushed)), 1u);
  const auto commit = world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {6.0}}));
  CHECK(world[0].waits(commit));
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  world[0].reply(commit);
}

// Who has pushed does a step of another set again before it pushes again.
TEST(server_joint_join_waits_for_pushes_that_can_be_applied) {
  World world(2);
  leave_of(world, {1});
  const auto hold = join(world[1], wire::JoinStep::kHoldPushed);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  world[0].error(world.push(0, push_for(0, nan)), ErrorCode::kNonFinite);
  CHECK(world[1].waits(hold));
  const auto push = world.push(0, push_for(0));
  CHECK_EQ(world[1].round_of(hold), 1u);
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  world[0].reply(push);
}

// Else the second would be told a later round of this set than of the other one.
TEST(server_joint_join_of_a_second_trainer_comes_a_round_later) {
  World world(3);
  leave_of(world, {1, 2});
  const auto hold = join(world[1], wire::JoinStep::kHoldPushed);
  const auto push = world.push(0, push_for(0));
  CHECK_EQ(world[1].round_of(hold), 1u);
  const auto second = join(world[2], wire::JoinStep::kHoldPushed);
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  world[0].reply(push);  // round 0 is not held for the second one
  CHECK(world[2].waits(second));
  const auto next = world.push(0, push_for(1));
  CHECK(world[2].waits(second));
  const auto early = world.push(1, push_for(1));
  CHECK_EQ(world[2].round_of(second), 2u);
  CHECK(world[1].waits(early));
  world[2].reply(join(world[2], wire::JoinStep::kRelease));
  world[0].reply(next);
  world[1].reply(early);
}

TEST(server_joint_join_is_told_of_a_loss) {
  World world(3);
  leave_of(world, {2});
  const auto hold = join(world[2], wire::JoinStep::kHoldPushed);
  CHECK(world[2].waits(hold));
  world[0].disconnect();
  CHECK(world[2].comes(hold));
  CHECK(contains(world[2].error(hold, ErrorCode::kPeerLost), "trainer 0"));
}

TEST(server_joint_join_is_refused_after_a_loss) {
  World world(3);
  leave_of(world, {1, 2});
  const auto hold = join(world[1], wire::JoinStep::kHoldPushed);
  world[0].disconnect();
  CHECK(world[1].comes(hold));
  CHECK(contains(world[2].error(join(world[2], wire::JoinStep::kHoldPushed), ErrorCode::kPeerLost),
                 "trainer 0"));
}

TEST(server_join_waits_for_pushes_of_the_round_it_was_named) {
  World world(3);
  leave_of(world, {2});
  world[2].error(join(world[2], wire::JoinStep::kOthersPushed), ErrorCode::kProtocol);
  CHECK_EQ(world[2].round_of(join(world[2], wire::JoinStep::kHold)), 1u);
  world[2].reply(join(world[2], wire::JoinStep::kRelease));
  const auto others = join(world[2], wire::JoinStep::kOthersPushed);
  for (size_t rank : {0, 1}) world.push(rank, push_for(0));
  CHECK(world[2].waits(others));  // that was the round before
  const auto first = world.push(0, push_for(1));
  CHECK(world[2].waits(others));
  world.push(1, push_for(1));
  CHECK_EQ(world[2].round_of(others), 1u);
  CHECK(world[0].waits(first));
  world[2].reply(world.push(2, push_for(1)));
  world[0].reply(first);
}

TEST(server_join_of_who_waits_for_pushes_goes_on_when_all_others_leave) {
  World world(2);
  leave_of(world, {1});
  CHECK_EQ(world[1].round_of(join(world[1], wire::JoinStep::kHold)), 1u);
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  const auto others = join(world[1], wire::JoinStep::kOthersPushed);
  CHECK(world[1].waits(others));
  leave_of(world, {0});
  CHECK_EQ(world[1].round_of(others), 1u);
  world[1].reply(world.push(1, push_for(1)));
}

TEST(server_join_of_who_waits_for_pushes_is_told_of_a_loss) {
  World world(2);
  leave_of(world, {1});
  world[1].reply(join(world[1], wire::JoinStep::kHold));
  world[1].reply(join(world[1], wire::JoinStep::kRelease));
  const auto others = join(world[1], wire::JoinStep::kOthersPushed);
  CHECK(world[1].waits(others));
  world[0].disconnect();
  CHECK(world[1].comes(others));
  CHECK(contains(world[1].error(others, ErrorCode::kPeerLost), "trainer 0"));
}

TEST(server_join_at_the_current_round) {
  World world(3);
  leave_of(world, {1, 2});
  world[0].reply(world.push(0, push_for(0)));
  CHECK_EQ(world[1].round_of(join(world[1], wire::JoinStep::kCurrent)), 1u);
  const auto push = world.push(0, push_for(1));
  CHECK(world[0].waits(push));
  // Somebody has pushed for it: it may be over elsewhere.
  CHECK(contains(world[2].error(join(world[2], wire::JoinStep::kCurrent), ErrorCode::kProtocol),
                 "which others have begun"));
  world[1].reply(world.push(1, push_for(1)));
  world[0].reply(push);
  CHECK_EQ(world[2].round_of(join(world[2], wire::JoinStep::kCurrent)), 2u);
}

}  // namespace cpudist::testing
