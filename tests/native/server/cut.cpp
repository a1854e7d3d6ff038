// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Markers of a snapshot's cut on one server that has no directory for snapshots: who is waited for,
// when they are answered, and with what. What is written is not looked at here.

#include <chrono>
#include <thread>

#include "support/patience.h"
#include "support/server_fixture.h"
#include "wire/cut.h"

namespace cpudist::testing::cuts {
namespace {

using wire::CutStep;

PushSpec ones(uint64_t round = 0) {
  PushSpec spec;
  spec.round = round;
  spec.blocks[0] = {1, 1, 1, 1};
  return spec;
}

constexpr uint64_t kLong = 600000;

uint64_t mark(Trainer& trainer, uint64_t number, const std::string& name = "",
              uint64_t wait_ms = kLong, CutStep step = CutStep::kMark) {
  return trainer.ask(wire::FrameKind::kCut, encode(wire::Cut{number, wait_ms, step, name}));
}

wire::CutReply said(const Trainer& trainer, uint64_t request) {
  return wire::decode_cut_reply(view(trainer.reply(request).payload));
}

// All have marked: what is wrong is only that there is nowhere to write to.
bool is_complete(const wire::CutReply& reply) {
  return reply.digest != 0 && !reply.taken && contains(reply.reason, "directory");
}

wire::CutReply await(const Trainer& trainer, uint64_t request) {
  const TimePoint deadline = Clock::now() + kPatience;
  while (trainer.waits(request)) {
    CHECK(Clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return said(trainer, request);
}

}  // namespace

TEST(cut_waits_for_all_and_answers_all) {
  World world(on_arrival(), server_options(3));
  const auto first = mark(world[0], 5, "snap-5");
  const auto second = mark(world[1], 5);
  CHECK(world[0].waits(first) && world[1].waits(second));
  world[2].reply(world.push(2, ones()));  // it goes on until it marks
  const auto third = mark(world[2], 5);
  for (const auto& [rank, request] : {std::pair(0, first), {1, second}, {2, third}}) {
    const wire::CutReply reply = said(world[static_cast<size_t>(rank)], request);
    CHECK(is_complete(reply));
    CHECK_EQ(reply.number, 5u);
    CHECK_EQ(reply.name, std::string("snap-5"));
    CHECK_EQ(reply.digest, said(world[0], first).digest);
  }
  world[0].reply(world.push(0, ones()));
}

TEST(cut_is_asked_for_in_replies_to_pushes_while_it_is_open) {
  World world(on_arrival(), server_options(2));
  const auto wanted = [&] { return world.dense(world[1].reply(world.push(1, ones()))).cut_wanted; };
  CHECK_EQ(wanted(), 0u);
  const auto first = mark(world[0], 9, "a");
  CHECK_EQ(wanted(), 9u);
  mark(world[1], 9);
  CHECK(is_complete(said(world[0], first)));
  CHECK_EQ(wanted(), 0u);
}

TEST(cut_that_is_announced_asks_its_own_trainer_too) {
  World world(2);
  const auto announced = mark(world[0], 4, "a", kLong, CutStep::kAnnounce);
  CHECK_EQ(said(world[0], announced).reason, std::string());
  const auto one = world.push(0, ones(0));
  const auto other = world.push(1, ones(0));
  CHECK_EQ(world.dense(world[0].reply(one)).cut_wanted, 4u);
  CHECK_EQ(world.dense(world[1].reply(other)).cut_wanted, 4u);
  const auto follower = mark(world[1], 4);
  CHECK(world[1].waits(follower));
  CHECK(is_complete(said(world[0], mark(world[0], 4, "a"))));
  CHECK(is_complete(said(world[1], follower)));
}

TEST(cut_says_which_pushes_of_whom_were_before_it) {
  const auto digest_after = [](size_t pushes_of_0, size_t pushes_of_1) {
    World world(on_arrival(), server_options(2));
    for (size_t i = 0; i < pushes_of_0; ++i) world[0].reply(world.push(0, ones()));
    for (size_t i = 0; i < pushes_of_1; ++i) world[1].reply(world.push(1, ones()));
    const auto first = mark(world[0], 1, "a");
    mark(world[1], 1);
    return said(world[0], first).digest;
  };
  CHECK_EQ(digest_after(2, 1), digest_after(2, 1));
  CHECK(digest_after(2, 1) != digest_after(1, 2));
  CHECK(digest_after(2, 1) != digest_after(2, 2));
}

TEST(cut_goes_on_without_who_leaves) {
  for (const auto kind : {wire::FrameKind::kLeave, wire::FrameKind::kClose,
                          wire::FrameKind::kGoodbye, wire::FrameKind::kBarrier}) {
    World world(on_arrival(), server_options(2));
    const auto first = mark(world[0], 5, "a");
    CHECK(world[0].waits(first));
    world[1].ask(kind);
    CHECK(is_complete(said(world[0], first)));
  }
}

TEST(cut_that_is_open_does_not_wait_for_who_comes_back) {
  World world(on_arrival(), server_options(3));
  world[2].reply(world[2].ask(wire::FrameKind::kLeave));
  const auto first = mark(world[0], 5, "a");
  world[2].reply(world[2].ask(wire::FrameKind::kJoin, encode(wire::Join{wire::JoinStep::kMember})));
  mark(world[1], 5);
  CHECK(is_complete(said(world[0], first)));
  // But for who has pushed since.
  const auto next = mark(world[0], 6, "b");
  world[2].reply(world.push(2, ones()));
  mark(world[1], 6);
  CHECK(world[0].waits(next));
  mark(world[2], 6);
  CHECK(is_complete(said(world[0], next)));
}

TEST(cut_stays_open_for_who_takes_a_marker_back) {
  World world(on_arrival(), server_options(3));
  const auto take_back = [&](int rank, uint64_t number) {
    Trainer& trainer = world[static_cast<size_t>(rank)];
    trainer.plain(wire::FrameKind::kCutStatus, 0, encode(wire::CutQuery{number, "", true}));
  };
  const auto wanted = [&](int rank) {
    return world.dense(world[static_cast<size_t>(rank)].reply(world.push(rank, ones()))).cut_wanted;
  };
  take_back(0, 5);  // nothing is there
  const auto first = mark(world[0], 5, "a");
  const auto second = mark(world[1], 5);
  take_back(0, 4);
  CHECK(world[0].waits(first) && world[1].waits(second));
  take_back(0, 5);
  const wire::CutReply back = said(world[0], first);
  CHECK(!back.taken && back.taken_back);
  CHECK(contains(back.reason, "trainer 0 has not waited longer for trainers 2"));
  CHECK(world[1].waits(second));  // its own stays
  // Who still evaluates would hold it again.
  CHECK_EQ(wanted(0), 0u);
  CHECK_EQ(wanted(0), 0u);
  CHECK_EQ(wanted(2), 5u);
  CHECK_EQ(wanted(0), 5u);
  const auto third = mark(world[2], 5);
  CHECK(world[1].waits(second) && world[2].waits(third));
  const auto again = mark(world[0], 5, "a");
  for (const auto& [rank, request] : {std::pair(0, again), {1, second}, {2, third}}) {
    CHECK(is_complete(said(world[static_cast<size_t>(rank)], request)));
  }
  CHECK(!said(world[0], again).taken_back);
  // The next one is asked for at once, as ever.
  mark(world[0], 6, "b");
  CHECK_EQ(wanted(1), 6u);
}

TEST(cut_is_not_taken_without_the_marker_of_who_asked) {
  World world(on_arrival(), server_options(2));
  const auto first = mark(world[0], 5, "a");
  world[0].plain(wire::FrameKind::kCutStatus, 0, encode(wire::CutQuery{5, "", true}));
  CHECK(said(world[0], first).taken_back);
  const auto second = mark(world[1], 5);
  CHECK(world[1].waits(second));
  world[0].ask(wire::FrameKind::kLeave);
  CHECK(contains(said(world[1], second).reason, "takes no part any more"));
}

TEST(cut_is_given_up_in_time_and_says_who_has_not_marked) {
  World world(on_arrival(), server_options(3));
  const auto first = mark(world[0], 5, "a", 30);
  const auto second = mark(world[1], 5, "", kLong);
  const wire::CutReply reply = await(world[0], first);
  CHECK(!reply.taken);
  CHECK(contains(reply.reason, "no marker in time from trainers 2"));
  CHECK_EQ(await(world[1], second).reason, reply.reason);
  CHECK_EQ(world.dense(world[2].reply(world.push(2, ones()))).cut_wanted, 0u);
  const auto late = mark(world[2], 5);
  CHECK(contains(said(world[2], late).reason, "cut 5 is over"));
}

TEST(cut_without_its_name_is_given_up_in_time) {
  World world(on_arrival(), server_options(2));
  const auto first = mark(world[0], 5, "", 30);
  const auto second = mark(world[1], 5);
  CHECK(contains(await(world[0], first).reason, "who asked for it"));
  await(world[1], second);
}

TEST(cut_whose_announcer_leaves_is_given_up) {
  World world(on_arrival(), server_options(2));
  mark(world[0], 5, "a", kLong, CutStep::kAnnounce);
  const auto second = mark(world[1], 5);
  CHECK(world[1].waits(second));
  world[0].reply(world[0].ask(wire::FrameKind::kLeave));
  CHECK(contains(said(world[1], second).reason, "takes no part any more"));
}

TEST(cut_is_one_at_a_time_and_numbers_rise) {
  World world(on_arrival(), server_options(2));
  const auto first = mark(world[0], 5, "snap-5");
  CHECK(contains(said(world[1], mark(world[1], 6)).reason, "snap-5 is still open"));
  mark(world[1], 5);
  CHECK(is_complete(said(world[0], first)));
  CHECK(contains(said(world[0], mark(world[0], 4, "b")).reason, "cut 4 is over"));
}

TEST(cut_may_be_abandoned) {
  World world(on_arrival(), server_options(2));
  const auto second = mark(world[1], 5);
  const auto abandoned = mark(world[0], 5, "", kLong, CutStep::kAbandon);
  CHECK(contains(said(world[1], second).reason, "trainer 0 has abandoned it"));
  CHECK(!said(world[0], abandoned).taken);
}

TEST(cut_refuses_what_cannot_be_a_number_or_a_name) {
  World world(on_arrival(), server_options(1));
  world[0].error(mark(world[0], 0, "a"), ErrorCode::kInvalidArgument);
  for (const char* name : {"../a", "a/b", ".a", "A"}) {
    CHECK(contains(world[0].error(mark(world[0], 1, name), ErrorCode::kInvalidArgument), name));
  }
  CHECK(is_complete(said(world[0], mark(world[0], 1, "a"))));
}

TEST(cut_marker_that_comes_twice_counts_once) {
  World world(on_arrival(), server_options(2));
  const auto first = mark(world[0], 5, "a");
  const auto again = [&](uint64_t request) {
    world[0].deliver(world[0].header(wire::FrameKind::kCut, 0, request, world[0].sequence()),
                     encode(wire::Cut{5, kLong, CutStep::kMark, "a"}));
    return request;
  };
  const auto repeated = again(world[0].next_request());
  CHECK(world[0].waits(first) && world[0].waits(repeated));
  mark(world[1], 5);
  CHECK(world[0].waits(first));  // the answer goes to the newest
  const wire::CutReply reply = said(world[0], repeated);
  CHECK(is_complete(reply));
  const auto later = again(world[0].next_request());
  CHECK_EQ(said(world[0], later).digest, reply.digest);  // from the record
}

TEST(cut_fails_with_the_loss_of_a_trainer_in_rounds) {
  server::ServerOptions options = server_options(2);
  options.reconnect_grace_ms = 30;
  World world(small_layout(), options);
  const auto first = mark(world[0], 5, "a");
  world[1].disconnect();
  const TimePoint deadline = Clock::now() + kPatience;
  while (world[0].waits(first)) {
    CHECK(Clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(contains(world[0].error(first, ErrorCode::kPeerLost), "trainer 1"));
  world[0].error(mark(world[0], 6, "b"), ErrorCode::kPeerLost);
}

TEST(cut_goes_on_without_who_is_lost) {
  server::ServerOptions options = server_options(3);
  options.elastic = true;
  options.reconnect_grace_ms = 30;
  World world(on_arrival(), options);
  const auto first = mark(world[0], 5, "a");
  mark(world[1], 5);
  world[2].disconnect();
  CHECK(is_complete(await(world[0], first)));
}

TEST(cut_is_failed_by_the_end_of_the_server) {
  World world(on_arrival(), server_options(2));
  const auto first = mark(world[0], 5, "a");
  world.server.stop("test");
  world[0].error(first, ErrorCode::kPeerLost);
}

TEST(cut_holds_nobody_who_waits_for_a_bound_on_staleness) {
  World world(on_arrival(1), server_options(2));
  world[0].reply(world.push(0, ones()));
  const auto held = world.push(0, ones());
  CHECK(world[0].waits(held));  // trainer 1 computes on what was before both
  const auto marker = mark(world[1], 5);
  world[0].reply(held);
  for (int i = 0; i < 3; ++i) world[0].reply(world.push(0, ones()));
  const auto named = mark(world[0], 5, "a");
  CHECK(is_complete(said(world[1], marker)));
  CHECK(is_complete(said(world[0], named)));
  world[0].reply(world.push(0, ones()));  // nobody waits for who has marked, until it has pushed
  world[1].reply(world.push(1, ones()));
  world[0].reply(world.push(0, ones()));
  const auto bounded = world.push(0, ones());
  CHECK(world[0].waits(bounded));
  world[1].reply(world.push(1, ones()));
  world[0].reply(bounded);
}

TEST(cut_status_asks_for_no_path) {
  World world(on_arrival(), server_options(1));
  const auto ask = [&](uint64_t number, const std::string& token) {
    return world[0].plain(wire::FrameKind::kCutStatus, 0, encode(wire::CutQuery{number, token}));
  };
  world[0].error(ask(0, "../token"), ErrorCode::kInvalidArgument);
  const auto status = [&](uint64_t request) {
    return wire::decode_cut_status(view(world[0].reply(request).payload));
  };
  const wire::CutStatus missing = status(ask(0, "token"));
  CHECK(missing.state == wire::CutState::kFailed);
  CHECK(contains(missing.reason, "directory"));
  CHECK(status(ask(7, "")).state == wire::CutState::kUnknown);
}

TEST(cut_status_says_who_takes_part) {
  World world(on_arrival(), server_options(3));
  const auto members = [&] {
    const auto request =
        world[0].plain(wire::FrameKind::kCutStatus, 0, encode(wire::CutQuery{0, ""}));
    return wire::decode_cut_status(view(world[0].reply(request).payload)).members;
  };
  CHECK((members() == std::vector<uint32_t>{0, 1, 2}));
  world[1].reply(world[1].ask(wire::FrameKind::kLeave));
  CHECK((members() == std::vector<uint32_t>{0, 2}));
  world[1].reply(world[1].ask(wire::FrameKind::kJoin, encode(wire::Join{wire::JoinStep::kMember})));
  CHECK((members() == std::vector<uint32_t>{0, 2}));
  world[1].reply(world.push(1, ones()));
  CHECK((members() == std::vector<uint32_t>{0, 1, 2}));
}

}  // namespace cpudist::testing::cuts
