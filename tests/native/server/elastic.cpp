// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one trainer's ways in and out, each with the same few lines before it.
//
// Trainers that come, are lost and come back while a server goes on.

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <thread>

#include "support/patience.h"
#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

server::ServerOptions elastic(uint32_t trainers, uint64_t rejoin_ms = 600000) {
  server::ServerOptions options = server_options(trainers);
  options.elastic = true;
  options.reconnect_grace_ms = 30;
  options.rejoin_ms = rejoin_ms;
  return options;
}

TimePoint in_time() { return Clock::now() + kPatience; }

PushSpec ones() {
  PushSpec spec;
  spec.blocks[0] = {1, 1, 1, 1};
  return spec;
}

// Waits until the server counts so many as lost.
void await_lost(const server::Server& server, uint64_t count) {
  const TimePoint deadline = in_time();
  while (server.stats().lost != count) {
    CHECK(Clock::now() < deadline);
    std::this_thread::sleep_for(milliseconds(1));
  }
}

void enter(Trainer& trainer, const World& world, uint32_t trainers) {
  trainer.reply(trainer.hello(trainers, 1), wire::FrameKind::kHello);
  const auto open = trainer.ask(wire::FrameKind::kOpen, encode(world.layout));
  CHECK(wire::decode_round_reply(view(trainer.reply(open).payload)).ready);
  trainer.reply(trainer.ask(wire::FrameKind::kReady));
}

// What a server says to a trainer of what an incarnation before it has had carried out.
uint64_t carried_out_before(Trainer& trainer, uint32_t trainers) {
  const wire::Frame hello = trainer.reply(trainer.hello(trainers, 1), wire::FrameKind::kHello);
  return wire::decode_hello(view(hello.payload)).carried_out_before;
}

void say_goodbye(Trainer& trainer) {
  trainer.reply(trainer.ask(wire::FrameKind::kGoodbye, Buffer(), wire::kNoParamSet));
}

}  // namespace

TEST(elastic_lost_trainer_comes_back_as_a_newer_incarnation) {
  World world(on_arrival(), elastic(2));
  world[1].reply(world.push(1, ones()));
  world[1].disconnect();
  await_lost(world.server, 1);
  world[0].reply(world.push(0, ones()));  // goes on meanwhile
  Trainer same(world.server, 1, 1);
  CHECK(contains(same.error(same.hello(2, 1), ErrorCode::kCountedLost),
                 "only a restart of it can come back"));
  Trainer newer(world.server, 1, 2);
  enter(newer, world, 2);
  CHECK_EQ(world.server.stats().lost, 0);
  newer.reply(newer.ask(wire::FrameKind::kPush, make_push(world.layout, ones())));
  CHECK_EQ(world.floats(0)[0], 7.0f);
  Trainer older(world.server, 1, 1);
  older.error(older.hello(2, 1), ErrorCode::kFenced);
}

TEST(elastic_newer_incarnation_is_told_what_was_carried_out) {
  World world(on_arrival(1), elastic(2));
  Trainer& lost = world[1];
  lost.reply(world.push(1, ones()));
  const uint64_t applied = lost.sequence();
  CHECK(lost.waits(world.push(1, ones())));  // for trainer 0, and is dropped
  lost.disconnect();
  await_lost(world.server, 1);
  Trainer second(world.server, 1, 2);
  CHECK_EQ(carried_out_before(second, 2), applied);
  second.disconnect();
  second.reconnect();
  CHECK_EQ(carried_out_before(second, 2), applied);
  // One that has asked for nothing has changed nothing of that.
  Trainer third(world.server, 1, 3);
  CHECK_EQ(carried_out_before(third, 2), applied);
  third.reply(third.ask(wire::FrameKind::kOpen, encode(world.layout)));
  Trainer fourth(world.server, 1, 4);
  CHECK_EQ(carried_out_before(fourth, 2), 1);
  // What was refused was not carried out.
  fourth.reply(fourth.ask(wire::FrameKind::kOpen, encode(world.layout)));
  fourth.reply(fourth.ask(wire::FrameKind::kReady));
  world[0].reply(world.push(0, ones()));  // which is waited for no more
  PushSpec nonfinite = ones();
  nonfinite.blocks[0][2] = std::numeric_limits<double>::quiet_NaN();
  fourth.error(fourth.ask(wire::FrameKind::kPush, make_push(world.layout, nonfinite)),
               ErrorCode::kNonFinite);
  Trainer fifth(world.server, 1, 5);
  CHECK_EQ(carried_out_before(fifth, 2), 2);
  Trainer fresh(world.server, 2);
  CHECK_EQ(carried_out_before(fresh, 2), 0);
}

// Also of a push that is being applied while its trainer is replaced: what is told is what the
// values have.
TEST(elastic_what_is_carried_out_is_what_values_have) {
  World world(on_arrival(), elastic(1));
  const Buffer push = make_push(world.layout, ones());
  auto now = std::make_unique<Trainer>(world.server, 0, 2);
  enter(*now, world, 1);
  uint64_t applied = 0;
  for (uint32_t incarnation = 3; incarnation <= 16; ++incarnation) {
    std::atomic<uint64_t> sent{0};
    std::thread other([&] {
      try {
        while (true) {
          now->ask(wire::FrameKind::kPush, push.share());
          ++sent;
        }
      } catch (const Error&) {  // its connection is closed
      }
    });
    while (sent < incarnation % 5 + 1) std::this_thread::yield();
    auto newer = std::make_unique<Trainer>(world.server, 0, incarnation);
    const uint64_t told = carried_out_before(*newer, 1);
    other.join();
    CHECK(told >= 2 + sent.load() - 1);
    applied += told - 2;  // but for open and ready
    newer->reply(newer->ask(wire::FrameKind::kOpen, encode(world.layout)));
    newer->reply(newer->ask(wire::FrameKind::kReady));
    CHECK_EQ(world.server.stats().rounds, applied);
    now = std::move(newer);
  }
}

// Ids are issued one by one: one far above those that are known is no trainer's, and gets no
// memory.
TEST(elastic_rank_far_above_all_is_refused) {
  World world(on_arrival(), elastic(2));
  const auto refuses = [&](uint32_t rank) {
    Trainer stranger(world.server, rank);
    return contains(stranger.error(stranger.hello(2, 1), ErrorCode::kConfigMismatch),
                    "ids are issued one by one");
  };
  CHECK(refuses(65535));
  CHECK_EQ(world.server.stats().trainers, 2);
  // Two that were expected, two that have come, and those that may be on their way.
  const uint32_t first = 2 + 2 + 1024;
  CHECK(refuses(first));
  Trainer late(world.server, first - 1);
  late.reply(late.hello(2, 1), wire::FrameKind::kHello);
  CHECK(refuses(first + 1));
  Trainer next(world.server, first);
  next.reply(next.hello(2, 1), wire::FrameKind::kHello);
  CHECK_EQ(world.server.stats().trainers, 4);
}

// Who says to be ever another trainer takes no more descriptors than there are for such.
TEST(elastic_trainers_beyond_those_expected_are_so_many_at_a_time) {
  server::ServerOptions options = elastic(2);
  options.more_trainers = 2;
  World world(on_arrival(), options);
  const auto enters = [](Trainer& one) { one.reply(one.hello(2, 1), wire::FrameKind::kHello); };
  Trainer third(world.server, 2);
  Trainer fourth(world.server, 3);
  enters(third);
  enters(fourth);
  Trainer fifth(world.server, 4);
  CHECK(contains(fifth.error(fifth.hello(2, 1), ErrorCode::kOverloaded), "Raise their limit"));
  third.reconnect();
  enters(third);
  world.trainers[0]->reconnect();
  enters(*world.trainers[0]);
  third.disconnect();
  await_lost(world.server, 1);
  fifth.reconnect();
  enters(fifth);
  CHECK_EQ(world.server.stats().trainers, 5);
}

// Incarnations count the starts of a trainer: one far above is a stranger's, and ends nobody.
TEST(elastic_incarnation_far_above_all_is_refused) {
  World world(on_arrival(), elastic(2));
  for (const uint32_t incarnation : {4000000u, 0xffffffffu}) {
    Trainer stranger(world.server, 1, incarnation);
    const std::string text = stranger.error(stranger.hello(2, 1), ErrorCode::kConfigMismatch);
    CHECK(contains(text, "incarnation " + std::to_string(incarnation) + ", expected at most"));
    CHECK(contains(text, "the last one met is 1"));
  }
  world[1].reply(world.push(1, ones()));  // it goes on
  Trainer next(world.server, 1, 2);       // and so does one that is started again
  enter(next, world, 2);
  next.reply(next.ask(wire::FrameKind::kPush, make_push(world.layout, ones())));
  CHECK_EQ(world.floats(0)[0], 8.0f);
  // Nor is there one of a trainer that has not come yet.
  Trainer early(world.server, 2, 0xffffffffu);
  CHECK(contains(early.error(early.hello(2, 1), ErrorCode::kConfigMismatch), "last one met is 0"));
}

// Where all are started together there is one start of each.
TEST(server_without_restarts_takes_the_first_incarnation_only) {
  World world(on_arrival(), server_options(2));
  for (const uint32_t incarnation : {2u, 0xffffffffu}) {
    Trainer stranger(world.server, 1, incarnation);
    CHECK(contains(stranger.error(stranger.hello(2, 1), ErrorCode::kConfigMismatch),
                   "expected at most 1"));
  }
  world[1].reply(world.push(1, ones()));
}

// A stranger that counted up before a trainer was started again ends that start's number only: it
// is told which one is the last, whatever has become of the stranger.
TEST(elastic_number_that_a_stranger_has_taken_is_outbid) {
  World world(on_arrival(), elastic(2));
  const auto is_fenced = [&](uint32_t incarnation, uint64_t last) {
    Trainer started(world.server, 1, incarnation);
    const uint64_t hello = started.hello(2, 1, 0, "host-a pid 13");
    const wire::Frame& answer = started.answer(hello);
    CHECK_EQ(answer.header.sequence, last);
    return wire::decode_error(view(answer.payload)).code == ErrorCode::kFenced;
  };
  Trainer stranger(world.server, 1, 4);
  stranger.reply(stranger.hello(2, 1, 0, "anybody"), wire::FrameKind::kHello);
  CHECK(is_fenced(2, 4));
  CHECK(is_fenced(4, 4));  // the same number, another process
  stranger.disconnect();
  await_lost(world.server, 1);
  CHECK(is_fenced(2, 4));
  CHECK(is_fenced(4, 4));
  Trainer next(world.server, 1, 5);
  enter(next, world, 2);
  next.reply(next.ask(wire::FrameKind::kPush, make_push(world.layout, ones())));
}

TEST(elastic_newer_incarnation_may_come_before_the_loss_is_noticed) {
  server::ServerOptions options = elastic(2);
  options.reconnect_grace_ms = 60000;
  World world(on_arrival(1), options);
  world[0].reply(world.push(0, ones()));
  const auto held = world.push(0, ones());
  CHECK(world[0].waits(held));
  Trainer newer(world.server, 1, 2);
  enter(newer, world, 2);
  CHECK(!world[0].waits(held));  // the older one's gradient will never come
  CHECK(world[1].connection()->closed());
  CHECK_THROWS(world.push(1, ones()), Error);  // fenced
  newer.reply(newer.ask(wire::FrameKind::kPush, make_push(world.layout, ones())));
  CHECK_EQ(world.floats(0)[0], 7.0f);
}

TEST(elastic_present_are_those_who_came_and_are_neither_lost_nor_done) {
  server::ServerOptions options = elastic(4);  // one of them never comes
  server::Server server(options);
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(server, rank, 1));
    trainers.back()->reply(trainers.back()->hello(4, 1), wire::FrameKind::kHello);
  }
  CHECK_EQ(server.stats().present, 3);
  say_goodbye(*trainers[1]);
  CHECK_EQ(server.stats().present, 2);
  trainers[0]->disconnect();
  await_lost(server, 1);
  CHECK_EQ(server.stats().present, 1);
  Trainer newer(server, 0, 2);
  newer.reply(newer.hello(4, 1), wire::FrameKind::kHello);
  CHECK_EQ(server.stats().present, 2);
}

TEST(elastic_who_asks_for_a_cut_is_told_whom_servers_wait_for) {
  World world(on_arrival(), elastic(4, 300));
  Trainer late(world.server, 4, 1);  // beyond those that are expected
  enter(late, world, 4);
  using Ranks = std::vector<uint32_t>;
  const auto waits_for = [&] {
    const auto request =
        world[0].plain(wire::FrameKind::kCutStatus, 0, encode(wire::CutQuery{0, ""}));
    const auto found = wire::decode_cut_status(view(world[0].reply(request).payload));
    return std::pair(found.present, found.lost);
  };
  CHECK(waits_for() == std::pair(Ranks{0, 1, 2, 3, 4}, Ranks{}));
  world[1].reply(world[1].ask(wire::FrameKind::kLeave));
  CHECK(waits_for() == std::pair(Ranks{0, 1, 2, 3, 4}, Ranks{}));
  say_goodbye(world[2]);
  world[3].disconnect();
  await_lost(world.server, 1);
  CHECK(waits_for() == std::pair(Ranks{0, 1, 4}, Ranks{3}));
  const TimePoint deadline = in_time();
  while (!waits_for().second.empty()) {
    CHECK(Clock::now() < deadline);
    std::this_thread::sleep_for(milliseconds(1));
  }
  CHECK(waits_for() == std::pair(Ranks{0, 1, 4}, Ranks{}));
  Trainer newer(world.server, 3, 2);
  enter(newer, world, 4);
  CHECK(waits_for() == std::pair(Ranks{0, 1, 3, 4}, Ranks{}));
}

TEST(elastic_waiting_push_of_a_lost_trainer_is_dropped_whole) {
  World world(on_arrival(1), elastic(2));
  world[1].reply(world.push(1, ones()));
  CHECK(world[1].waits(world.push(1, ones())));
  world[1].disconnect();
  await_lost(world.server, 1);
  const TimePoint deadline = in_time();
  while (world.server.stats().pending_bytes != 0) CHECK(Clock::now() < deadline);
  world[0].reply(world.push(0, ones()));
  CHECK_EQ(world.floats(0)[0], 8.0f);
}

TEST(elastic_requests_of_a_lost_trainer_do_nothing) {
  server::ServerOptions options = elastic(1);
  options.liveness_ms = 100;
  World world(on_arrival(1), options);
  world[0].connection()->answer_late();
  CHECK(world[0].connection()->wait_for_close(in_time()));
  // Frames that were read before the close reached its thread. It is told what a hello would be.
  const auto open = world[0].ask(wire::FrameKind::kOpen, encode(world.layout));
  const auto push = world.push(0, ones());
  const std::string told =
      "trainer 0 (host-a pid 12, fake:0) was lost: silent for 0.1 s; only a restart of it can come "
      "back";
  CHECK_EQ(world[0].error(open, ErrorCode::kCountedLost), told);
  CHECK_EQ(world[0].error(push, ErrorCode::kCountedLost), told);
  CHECK_EQ(world[0].connection()->reason(), told);
  CHECK_EQ(world.server.stats().rounds, 0);
  Trainer again(world.server, 0);
  CHECK_EQ(again.error(again.hello(1, 1), ErrorCode::kCountedLost), told);
}

TEST(elastic_rank_beyond_the_count_joins_on_arrival_only) {
  World world(on_arrival(), elastic(1));
  Trainer late(world.server, 5);
  enter(late, world, 1);
  late.reply(late.ask(wire::FrameKind::kPush, make_push(world.layout, ones())));
  CHECK_EQ(world.floats(0)[0], 9.0f);
  CHECK_EQ(world.server.stats().trainers, 2);

  World rounds(small_layout(), elastic(1));
  Trainer other(rounds.server, 1);
  other.reply(other.hello(1, 1), wire::FrameKind::kHello);
  const auto open = other.ask(wire::FrameKind::kOpen, encode(rounds.layout));
  CHECK(contains(other.error(open, ErrorCode::kConfigMismatch), "only Async takes more"));

  World fixed(on_arrival(), server_options(1));
  Trainer stranger(fixed.server, 1);
  stranger.error(stranger.hello(1, 1), ErrorCode::kConfigMismatch);
}

TEST(elastic_barrier_goes_on_without_a_lost_trainer) {
  World world(on_arrival(), elastic(3));
  const auto first = world[0].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  const auto second = world[1].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  CHECK(world[0].waits(first));
  world[2].disconnect();
  CHECK(world[0].connection()->wait_for_answer(first, in_time()));
  CHECK(world[1].connection()->wait_for_answer(second, in_time()));
  world[0].reply(first);
  world[1].reply(second);
  const auto again = world[0].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  world[1].reply(world[1].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet));
  world[0].reply(again);
}

TEST(elastic_rounds_do_not_begin_without_a_trainer_that_never_came) {
  server::ServerOptions options = elastic(2);
  options.join_deadline_ms = 30;
  server::Server server(options);
  Trainer first(server, 0, 1);
  first.reply(first.hello(2, 1), wire::FrameKind::kHello);
  await_lost(server, 1);
  first.error(first.ask(wire::FrameKind::kOpen, encode(small_layout())), ErrorCode::kPeerLost);
  // Once it has come, both are members.
  Trainer second(server, 1, 1);
  second.reply(second.hello(2, 1), wire::FrameKind::kHello);
  Trainer again(server, 0, 2);
  again.reply(again.hello(2, 1), wire::FrameKind::kHello);
  for (Trainer* trainer : {&again, &second}) {
    trainer->reply(trainer->ask(wire::FrameKind::kOpen, encode(small_layout())));
  }
}

TEST(elastic_barrier_of_rounds_fails_for_a_lost_trainer) {
  World world(small_layout(), elastic(2));
  const auto barrier = world[0].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  world[1].disconnect();
  CHECK(world[0].connection()->wait_for_answer(barrier, in_time()));
  world[0].error(barrier, ErrorCode::kPeerLost);
}

TEST(elastic_server_is_done_once_a_lost_trainer_is_given_up) {
  World world(on_arrival(), elastic(2, 100));
  world[1].disconnect();
  say_goodbye(world[0]);
  const TimePoint began = Clock::now();
  CHECK(world.server.wait_done(in_time()));
  CHECK(Clock::now() - began >= milliseconds(100));
}

TEST(elastic_server_waits_for_a_trainer_that_is_back) {
  World world(on_arrival(), elastic(2, 300));
  world[1].disconnect();
  await_lost(world.server, 1);
  Trainer newer(world.server, 1, 2);
  enter(newer, world, 2);
  say_goodbye(world[0]);
  CHECK(!world.server.wait_done(Clock::now() + milliseconds(500)));
  say_goodbye(newer);
  CHECK(world.server.wait_done(in_time()));
}

TEST(elastic_values_outlive_the_others_while_a_lost_trainer_may_return) {
  World world(on_arrival(), elastic(2));
  world[0].reply(world.push(0, ones()));
  world[1].disconnect();
  await_lost(world.server, 1);
  say_goodbye(world[0]);
  Trainer newer(world.server, 1, 2);
  enter(newer, world, 2);
  const wire::Frame reply =
      newer.reply(newer.ask(wire::FrameKind::kPush, make_push(world.layout, ones())));
  CHECK_EQ(world.dense(reply).version.round, 2);
  say_goodbye(newer);
  CHECK(world.server.wait_done(in_time()));
  CHECK_EQ(world.server.stats().rows, 0);
}

TEST(elastic_goodbye_and_then_a_newer_incarnation) {
  World world(on_arrival(), elastic(2));
  say_goodbye(world[1]);
  Trainer newer(world.server, 1, 2);
  enter(newer, world, 2);
  newer.reply(newer.ask(wire::FrameKind::kPush, make_push(world.layout, ones())));
  CHECK_EQ(world.floats(0)[0], 9.0f);
  say_goodbye(world[0]);
  CHECK(!world.server.wait_done(Clock::now()));
  say_goodbye(newer);
  CHECK(world.server.wait_done(in_time()));
}

TEST(elastic_trainer_zero_lost_before_ready_is_told_to_all_and_may_return) {
  World world(on_arrival(), elastic(2), false);
  const auto ready = world[1].ask(wire::FrameKind::kReady);
  world[0].disconnect();
  CHECK(world[1].connection()->wait_for_answer(ready, in_time()));
  world[1].error(ready, ErrorCode::kPeerLost);
  Trainer newer(world.server, 0, 2);
  newer.reply(newer.hello(2, 1), wire::FrameKind::kHello);
  newer.reply(newer.ask(wire::FrameKind::kOpen, encode(world.layout)));
  newer.reply(newer.ask(wire::FrameKind::kStore, store_all(world.layout, world.options)));
  newer.reply(newer.ask(wire::FrameKind::kReady));
  world[1].reply(world[1].ask(wire::FrameKind::kReady));
}

}  // namespace cpudist::testing
