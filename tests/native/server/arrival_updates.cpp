// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Updates on arrival as a server makes them: what is applied at once, what a bound on staleness
// holds, and what releases it.

#include "support/patience.h"
#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

wire::ParamSetLayout arrival_layout(uint64_t max_staleness = wire::kAnyStaleness) {
  wire::ParamSetLayout layout = small_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.max_staleness = max_staleness;
  return layout;
}

Buffer gradient(const wire::ParamSetLayout& layout, double value, uint64_t samples = 1,
                bool want_dense = true) {
  wire::PushHeader header;
  header.configs = layout.configs;
  header.samples = samples;
  header.want_dense = want_dense;
  const wire::BlockRef ref{0, 16, 0, 0};
  wire::FilledPush push = wire::layout_push(header, std::span(&ref, 1), {}, nullptr);
  const std::vector<float> values(4, static_cast<float>(value));
  std::memcpy(push.blocks[0], values.data(), 16);
  return std::move(push.payload);
}

struct Arrivals : World {
  Arrivals(uint32_t count, uint64_t max_staleness, server::ServerOptions given)
      : World(arrival_layout(max_staleness), given) {
    CHECK_EQ(count, given.trainer_count);
  }
  explicit Arrivals(uint32_t count, uint64_t max_staleness = wire::kAnyStaleness)
      : Arrivals(count, max_staleness, server_options(count)) {}
  uint64_t give(size_t rank, double value = 1.0, uint64_t samples = 1, bool want_dense = true) {
    return trainers[rank]->ask(wire::FrameKind::kPush,
                               gradient(layout, value, samples, want_dense));
  }
  uint64_t updates_at(size_t rank, uint64_t request) const {
    return dense(trainers[rank]->reply(request)).version.round;
  }
};

}  // namespace

TEST(arrival_push_is_applied_at_once_and_tells_the_version) {
  Arrivals world(3);
  const wire::DenseView first = world.dense(world[1].reply(world.give(1, 2.0, 7)));
  CHECK_EQ(first.version.round, 1);
  CHECK_EQ(first.version.samples, 7);
  CHECK_EQ(first.blocks.size(), 2);  // every block, with a gradient or not
  CHECK_EQ(world.floats(0)[0], 8.0f);
  const wire::DenseView second = world.dense(world[1].reply(world.give(1, 1.0, 5, false)));
  CHECK_EQ(second.version.round, 2);
  CHECK_EQ(second.version.samples, 12);
  CHECK_EQ(second.blocks.size(), 0);
  CHECK_EQ(world.floats(0)[0], 7.0f);  // neither divided nor waited for
  CHECK_EQ(world.updates_at(0, world.give(0)), 3);
  CHECK_EQ(world.server.stats().rounds, 3);
  CHECK_EQ(world.server.stats().pending_bytes, 0);
}

TEST(arrival_repeated_push_is_applied_once) {
  Arrivals world(1);
  const auto id = world.give(0, 2.0);
  world[0].reply(id);
  const auto again = world[0].next_request();
  world[0].deliver(world[0].header(wire::FrameKind::kPush, 0, again, world[0].sequence()),
                   gradient(world.layout, 2.0));
  CHECK_EQ(world.updates_at(0, again), 1);
  CHECK_EQ(world.floats(0)[0], 8.0f);
}

TEST(arrival_bound_holds_a_push_until_the_older_gradient_is_applied) {
  Arrivals world(2, 1);
  CHECK_EQ(world.updates_at(0, world.give(0, 1.0)), 1);
  const auto early = world.give(0, 1.0);  // trainer 1 still computes on update 0
  CHECK(world[0].waits(early));
  CHECK(world.server.stats().pending_bytes > 0);
  CHECK_EQ(world.floats(0)[0], 9.0f);
  CHECK_EQ(world.updates_at(1, world.give(1, 1.0)), 2);
  CHECK_EQ(world.updates_at(0, early), 3);
  CHECK_EQ(world.floats(0)[0], 7.0f);
  CHECK_EQ(world.server.stats().pending_bytes, 0);
}

TEST(arrival_bound_releases_in_the_order_in_which_gradients_are_due) {
  Arrivals world(4, 3);
  world[3].reply(world.give(3));
  world[2].reply(world.give(2));
  world[1].reply(world.give(1));
  // Trainer 0 computes on update 0 and is due now; the others read at 1, 2 and 3.
  std::map<size_t, uint64_t> held;
  for (const size_t rank : {1, 2, 3}) held[rank] = world.give(rank);
  for (const auto& [rank, id] : held) CHECK(world[rank].waits(id));
  CHECK_EQ(world.updates_at(0, world.give(0)), 4);
  CHECK_EQ(world.updates_at(3, held[3]), 5);
  CHECK_EQ(world.updates_at(2, held[2]), 6);
  CHECK_EQ(world.updates_at(1, held[1]), 7);
}

TEST(arrival_bound_is_never_broken_and_never_stops) {
  // Trainers push in a skewed random order; ages are counted here, apart from the server.
  constexpr uint32_t kTrainers = 4;
  constexpr uint64_t kBound = 5;
  Arrivals world(kTrainers, kBound);
  std::map<size_t, uint64_t> waiting;
  std::vector<uint64_t> read(kTrainers, 0);
  uint64_t applied = 0;
  uint64_t state = 1;
  const auto collect = [&] {
    for (auto entry = waiting.begin(); entry != waiting.end();) {
      const auto& [rank, id] = *entry;
      if (world[rank].waits(id)) {
        ++entry;
        continue;
      }
      const uint64_t round = world.updates_at(rank, id);
      CHECK(round - 1 - read[rank] <= kBound);
      read[rank] = round;
      ++applied;
      entry = waiting.erase(entry);
    }
  };
  while (applied < 2000) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const size_t draw = (state >> 33) % 16;
    const size_t rank = draw < 8 ? 0 : draw < 13 ? 1 : draw < 15 ? 2 : 3;
    if (!waiting.contains(rank)) waiting[rank] = world.give(rank, 0.0);
    collect();
    CHECK(waiting.size() < kTrainers);  // the earliest due is never held
  }
}

TEST(arrival_second_push_while_one_waits_is_refused) {
  Arrivals world(2, 1);
  world[0].reply(world.give(0));
  const auto held = world.give(0);
  CHECK(world[0].waits(held));
  // A trainer that numbers past its waiting request breaks the protocol on its own connection.
  world[0].error(world.give(0), ErrorCode::kProtocol);
  world[1].reply(world.give(1));
  CHECK_EQ(world.updates_at(0, held), 3);
}

TEST(arrival_leave_and_close_and_goodbye_release_what_is_held) {
  for (const wire::FrameKind kind :
       {wire::FrameKind::kLeave, wire::FrameKind::kClose, wire::FrameKind::kGoodbye}) {
    Arrivals world(2, 1);
    world[0].reply(world.give(0));
    const auto held = world.give(0);
    CHECK(world[0].waits(held));
    world[1].reply(
        world[1].ask(kind, Buffer(), kind == wire::FrameKind::kGoodbye ? wire::kNoParamSet : 0));
    CHECK_EQ(world.updates_at(0, held), 2);
  }
}

TEST(arrival_join_takes_part_in_the_bound_again) {
  Arrivals world(2, 1);
  world[1].reply(world[1].ask(wire::FrameKind::kLeave));
  for (int i = 0; i < 5; ++i) world[0].reply(world.give(0));
  world[1].reply(
      world[1].ask(wire::FrameKind::kJoin, encode(wire::Join{wire::JoinStep::kMember, 0})));
  world[0].reply(world.give(0));
  CHECK(world[0].waits(world.give(0)));
}

TEST(arrival_more_readers_than_the_bound_has_room_for_are_refused) {
  server::ServerOptions options = server_options(2);
  options.elastic = true;
  Arrivals world(2, 1, options);
  Trainer third(world.server, 2);
  third.reply(third.hello(2, 1), wire::FrameKind::kHello);
  third.reply(third.ask(wire::FrameKind::kOpen, encode(world.layout)));
  const auto refused = third.ask(wire::FrameKind::kReady);
  CHECK(contains(third.error(refused, ErrorCode::kConfigMismatch), "max_staleness = 1"));
  // A barrier makes all three take part again: the one without room does not spoil it.
  const auto first = world[0].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  const auto second = world[1].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  third.reply(third.ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet));
  world[0].reply(first);
  world[1].reply(second);
  // Once another has left there is room.
  world[1].reply(world[1].ask(wire::FrameKind::kLeave));
  third.reply(third.ask(wire::FrameKind::kReady));
}

TEST(arrival_barrier_does_not_wait_for_values_of_who_never_opened) {
  World world(arrival_layout(1), server_options(2), false);
  Trainer& first = world[0];
  first.reply(first.ask(wire::FrameKind::kStore, store_all(world.layout, world.options)));
  first.reply(first.ask(wire::FrameKind::kReady));
  // A second set that only trainer 0 has opened.
  first.reply(first.ask(wire::FrameKind::kOpen, encode(world.layout), 1));
  first.reply(first.ask(wire::FrameKind::kStore, store_all(world.layout, world.options), 1));
  first.reply(first.ask(wire::FrameKind::kReady, Buffer(), 1));
  const auto a = first.ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  world[1].reply(world[1].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet));
  first.reply(a);
  for (int i = 0; i < 4; ++i) {
    first.reply(first.ask(wire::FrameKind::kPush, gradient(world.layout, 1.0), 1));
  }
}

TEST(arrival_lost_trainer_releases_what_it_held_and_breaks_nothing) {
  server::ServerOptions options = server_options(3);
  options.reconnect_grace_ms = 30;
  Arrivals world(3, 2, options);
  world[0].reply(world.give(0));
  world[1].reply(world.give(1));
  const auto held = world.give(0);
  CHECK(world[0].waits(held));  // until trainer 2 has pushed
  world[2].disconnect();
  CHECK(world[0].connection()->wait_for_answer(held, Clock::now() + kPatience));
  CHECK_EQ(world.updates_at(0, held), 3);
  for (int i = 0; i < 4; ++i) {
    world[1].reply(world.give(1));
    world[0].reply(world.give(0));
  }
  CHECK_EQ(world.floats(0)[0], 10.0f - 11.0f);
}

TEST(arrival_memory_cap_never_refuses_what_the_others_wait_for) {
  server::ServerOptions options = server_options(2);
  const wire::ParamSetLayout layout = arrival_layout(1);
  const uint64_t size = gradient(layout, 1.0).size();
  options.memory_cap_bytes = size + values_bytes(layout, options);
  Arrivals world(2, 1, options);
  world[0].reply(world.give(0));
  const auto held = world.give(0);
  CHECK(world[0].waits(held));
  CHECK_EQ(world.server.stats().pending_bytes, size);
  CHECK_EQ(world.updates_at(1, world.give(1)), 2);
  CHECK_EQ(world.updates_at(0, held), 3);
}

TEST(arrival_memory_cap_refuses_as_overload_what_may_fit_later_only) {
  server::ServerOptions options = server_options(3);
  const uint64_t size = gradient(arrival_layout(2), 1.0).size();
  options.memory_cap_bytes = size + values_bytes(arrival_layout(2), options);
  Arrivals world(3, 2, options);
  world[0].reply(world.give(0));
  world[1].reply(world.give(1));
  const auto held = world.give(0);
  CHECK(world[0].waits(held));
  world[1].error(world.give(1), ErrorCode::kOverloaded);
  world[1].take_back();  // not recorded: the same number comes again
  world[2].reply(world.give(2));
  world[0].reply(held);
  world[1].reply(world.give(1));
  PushSpec large;
  for (int64_t i = 0; i < 1024; ++i) large.tables[0].emplace_back(i % 64, 1.0f);
  const auto never = world[1].ask(wire::FrameKind::kPush, make_push(world.layout, large));
  CHECK(contains(world[1].error(never, ErrorCode::kInvalidArgument), "never fits"));
}

}  // namespace cpudist::testing
