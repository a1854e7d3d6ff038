// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Lost trainers: who notices, when, and what the others are told. Deadlines are short and waited
// for through wait_done, which ends with the loss.

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <thread>

#include "support/patience.h"
#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

TimePoint shortly() { return Clock::now() + kPatience; }

std::string loss_of(server::Server& server) {
  try {
    server.wait_done(shortly());
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kPeerLost);
    return error.what();
  }
  fail(__FILE__, __LINE__, "nobody was lost");
}

server::ServerOptions quick(uint32_t trainers) {
  server::ServerOptions options = server_options(trainers);
  options.reconnect_grace_ms = 30;
  return options;
}

// The answers are sent after wait_done learns of the loss: a bounded wait for them.
void await_answer(const Trainer& trainer, uint64_t request) {
  if (trainer.connection()->wait_for_answer(request, shortly())) return;
  fail(__FILE__, __LINE__, "request " + std::to_string(request) + " is not answered");
}

}  // namespace

TEST(server_broken_link_loses_the_trainer_and_fails_all_who_wait) {
  World world(small_layout(), quick(3));
  const auto push = world.push(0, {});
  const auto barrier = world[1].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  CHECK(world[0].waits(push) && world[1].waits(barrier));
  world[2].disconnect();
  const auto text = loss_of(world.server);
  CHECK_EQ(text,
           "trainer 2 (host-a pid 12, fake:2) was lost: connection closed and not replaced within "
           "0.0 s");
  await_answer(world[0], push);
  await_answer(world[1], barrier);
  CHECK_EQ(world[0].error(push, ErrorCode::kPeerLost), text);
  CHECK_EQ(world[1].error(barrier, ErrorCode::kPeerLost), text);
  CHECK_EQ(world[0].error(world.push(0, {}), ErrorCode::kPeerLost), text);  // would wait for it
  const auto again = world[0].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  CHECK_EQ(world[0].error(again, ErrorCode::kPeerLost), text);
  world[0].reply(world[0].plain(wire::FrameKind::kPullDense, 0, Buffer()));  // waits for nobody
  CHECK_EQ(world.server.stats().pending_bytes, 0u);
  world[2].reconnect();
  CHECK(contains(world[2].error(world[2].hello(3, 1), ErrorCode::kPeerLost), "cannot come back"));
}

TEST(server_trainer_whose_process_has_ended_is_lost_when_its_link_breaks) {
  server::ServerOptions options = server_options(2);
  options.reconnect_grace_ms = 60000;  // longer than anybody waits here
  World world(small_layout(), options);
  const Descriptor process(eventfd(0, EFD_CLOEXEC));
  const auto reconnect = [&] {
    world[1].disconnect();
    world[1].reconnect();
    world[1].connection()->set_process(Descriptor(dup(process.get())));
    world[1].reply(world[1].hello(2, 1), wire::FrameKind::kHello);
  };
  reconnect();
  reconnect();
  // What has come over an open link may not have been read yet.
  CHECK_EQ(eventfd_write(process.get(), 1), 0);
  CHECK(!world.server.wait_done(Clock::now()));
  world[1].reply(world[1].plain(wire::FrameKind::kPullDense, 0, Buffer()));
  world[1].disconnect();
  CHECK_EQ(loss_of(world.server),
           "trainer 1 (host-a pid 12, fake:1) was lost: its process has ended");
}

TEST(server_trainer_whose_process_ends_after_its_link_is_lost_then) {
  server::ServerOptions options = server_options(1);
  options.reconnect_grace_ms = 60000;
  World world(small_layout(), options);
  const Descriptor process(eventfd(0, EFD_CLOEXEC));
  world[0].disconnect();
  world[0].reconnect();
  world[0].connection()->set_process(Descriptor(dup(process.get())));
  world[0].reply(world[0].hello(1, 1), wire::FrameKind::kHello);
  world[0].disconnect();
  CHECK(!world.server.wait_done(Clock::now()));
  CHECK_EQ(eventfd_write(process.get(), 1), 0);
  CHECK(contains(loss_of(world.server), "was lost: its process has ended"));
}

TEST(server_trainer_that_said_goodbye_before_its_process_ended_is_not_lost) {
  World world(small_layout(), server_options(1));
  const Descriptor process(eventfd(1, EFD_CLOEXEC));
  world[0].disconnect();
  world[0].reconnect();
  world[0].connection()->set_process(Descriptor(dup(process.get())));
  world[0].reply(world[0].hello(1, 1), wire::FrameKind::kHello);
  world[0].reply(world[0].ask(wire::FrameKind::kGoodbye, Buffer(), wire::kNoParamSet));
  world[0].disconnect();
  CHECK(world.server.wait_done(shortly()));
}

TEST(server_link_replaced_in_time_loses_nobody) {
  server::ServerOptions options = server_options(1);
  options.reconnect_grace_ms = 60000;
  World world(small_layout(), options);
  world[0].disconnect();
  world[0].reconnect();
  world[0].reply(world[0].hello(1, 1), wire::FrameKind::kHello);
  world[0].reply(world.push(0, {}));
  CHECK(!world.server.wait_done(Clock::now()));
}

TEST(server_silence_loses_the_trainer) {
  server::ServerOptions options = server_options(1);
  options.liveness_ms = 100;
  World world(small_layout(), options);
  CHECK_EQ(loss_of(world.server), "trainer 0 (host-a pid 12, fake:0) was lost: silent for 0.1 s");
  CHECK(world[0].connection()->wait_for_close(shortly()));
}

TEST(server_tells_the_lost_trainer_itself_that_it_cannot_come_back) {
  server::ServerOptions options = server_options(2);
  options.liveness_ms = 100;
  World world(small_layout(), options);
  for (const uint32_t rank : {0u, 1u}) world[rank].connection()->answer_late();
  const auto waits = world.push(0, {});
  await_answer(world[0], waits);
  // Whoever of the two was silent for longer; the other is told of that one.
  const std::string text = world[0].error(waits, ErrorCode::kPeerLost);
  const uint32_t lost = contains(text, "trainer 0 ") ? 0 : 1;
  CHECK_EQ(contains(text, "; it cannot come back"), lost == 0);
  const std::string told = lost == 0 ? text : text + "; it cannot come back";
  // A request that was read before the close of its connection reached its thread.
  CHECK(world[lost].closes());
  const auto late = world[lost].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  CHECK_EQ(world[lost].error(late, ErrorCode::kPeerLost), told);
}

TEST(server_bytes_of_a_long_frame_are_a_sign_of_life) {
  server::ServerOptions options = server_options(1);
  options.liveness_ms = 200;
  World world(small_layout(), options);
  const TimePoint end = Clock::now() + std::chrono::milliseconds(700);
  while (Clock::now() < end) {
    world[0].connection()->move_bytes();
    CHECK(!world.server.wait_done(Clock::now() + std::chrono::milliseconds(10)));
  }
  CHECK(contains(loss_of(world.server), "silent for 0.2 s"));
}

TEST(server_set_opened_after_a_goodbye_waits_for_the_rest_only) {
  World world(small_layout(), server_options(2));
  world[1].ask(wire::FrameKind::kGoodbye, Buffer(), wire::kNoParamSet);
  world[0].reply(world[0].ask(wire::FrameKind::kOpen, encode(small_layout()), 1));
  const Buffer values = store_all(small_layout(), server_options(2));
  world[0].reply(world[0].ask(wire::FrameKind::kStore, values.share(), 1));
  world[0].reply(world[0].ask(wire::FrameKind::kReady, Buffer(), 1));
  world[0].reply(world[0].ask(wire::FrameKind::kPush, make_push(small_layout(), {}), 1));
}

TEST(server_set_without_trainer_zero_is_never_ready) {
  World world(small_layout(), server_options(2));
  world[0].ask(wire::FrameKind::kGoodbye, Buffer(), wire::kNoParamSet);
  world[1].reply(world[1].ask(wire::FrameKind::kOpen, encode(small_layout()), 1));
  const auto ready = world[1].ask(wire::FrameKind::kReady, Buffer(), 1);
  CHECK(contains(world[1].error(ready, ErrorCode::kClosed), "trainer 0"));
}

TEST(server_trainer_that_never_came_is_lost) {
  server::ServerOptions options = server_options(2);
  options.join_deadline_ms = 100;
  server::Server server(options);
  Trainer first(server, 0);
  first.hello(2, 1);
  CHECK_EQ(loss_of(server), "trainer 1 was lost: never connected within 0.1 s");
}

TEST(server_ready_fails_when_trainer_zero_is_lost) {
  World world(small_layout(), quick(2), false);
  const auto ready = world[1].ask(wire::FrameKind::kReady);
  world[0].disconnect();
  loss_of(world.server);
  await_answer(world[1], ready);
  world[1].error(ready, ErrorCode::kPeerLost);
  world[1].error(world[1].ask(wire::FrameKind::kReady), ErrorCode::kPeerLost);
}

TEST(server_trainer_lost_between_the_phases_of_a_round_ends_the_next_one) {
  for (const bool clip_each : {false, true}) {
    World world(small_layout(), quick(2));
    PushSpec spec;
    spec.clip_norm = 2.0;
    spec.clip_each = clip_each;
    spec.blocks[0] = {8, 0, 0, 0};
    const auto first = world.push(0, spec);
    world.push(1, spec);
    world[0].reply(first);
    world[1].disconnect();
    loss_of(world.server);
    // All gradients are there: the round is applied for whoever is left, once.
    const wire::Commit commit{0, std::vector<double>(clip_each ? 3 : 1, 4.0)};
    world[0].reply(world[0].ask(wire::FrameKind::kCommit, encode(commit)));
    CHECK_EQ(world.floats(0)[0], 10 - 8.0f * static_cast<float>(2.0 / (4.0 + 1e-6)));
    spec.round = 1;
    world[0].error(world.push(0, spec), ErrorCode::kPeerLost);
    CHECK_EQ(world.server.stats().rounds, 1u);
  }
}

TEST(server_goodbye_is_no_loss) {
  World world(small_layout(), quick(2));
  world[1].ask(wire::FrameKind::kGoodbye, Buffer(), wire::kNoParamSet);
  world[1].disconnect();
  CHECK(!world.server.wait_done(Clock::now() + std::chrono::milliseconds(120)));
  world[0].reply(world.push(0, {}));
  world[0].ask(wire::FrameKind::kGoodbye, Buffer(), wire::kNoParamSet);
  CHECK(world.server.wait_done(shortly()));
}

TEST(server_survivors_of_a_left_trainer_go_on) {
  World world(small_layout(), quick(2));
  world[1].ask(wire::FrameKind::kLeave);
  world[1].disconnect();
  loss_of(world.server);
  world[0].reply(world.push(0, {}));  // waits for no lost trainer
}

TEST(server_takes_requests_from_many_threads) {
  constexpr uint32_t kTrainers = 4;
  constexpr uint64_t kRounds = 60;
  World world(kTrainers, 2);
  std::vector<std::exception_ptr> errors(kTrainers);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kTrainers; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        for (uint64_t round = 0; round < kRounds; ++round) {
          PushSpec spec;
          spec.round = round;
          spec.blocks[0] = {1, 1, 1, 1};
          spec.tables[0] = {{static_cast<int64_t>(rank), 4.0f}, {40, 1.0f}};
          const auto id = world.push(rank, spec);
          world[rank].reply(world[rank].plain(wire::FrameKind::kPullDense, 0, Buffer()));
          await_answer(world[rank], id);
          world[rank].reply(id);
        }
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  CHECK_EQ(world.floats(0)[0], 10.0f - kRounds);
  CHECK_EQ(world.row(2)[0], 2.0f - kRounds);
  CHECK_EQ(world.row(40)[0], 40.0f - kRounds);
  CHECK_EQ(world.server.stats().rounds, kRounds);
}

}  // namespace cpudist::testing
