// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a server adds, and what it tells whom, where trainers exchange deltas.

#include <set>
#include <thread>

#include "support/patience.h"
#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

wire::ParamSetLayout deltas() {
  wire::ParamSetLayout layout = small_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.exchanges_deltas = true;
  return layout;
}

// Moves these rows by +1.
PushSpec moving(const std::vector<int64_t>& keys) {
  PushSpec spec;
  for (const int64_t key : keys) spec.tables[0].emplace_back(key, -1.0f);
  return spec;
}

struct Reply {
  wire::Frame frame;
  wire::ChangesView view;

  std::set<int64_t> keys() const {
    return {view.tables[0].keys.begin(), view.tables[0].keys.end()};
  }
  float row(int64_t key) const {
    for (size_t i = 0; i < view.tables[0].keys.size(); ++i) {
      if (view.tables[0].keys[i] == key) return view.tables[0].rows[i * 4];
    }
    fail(__FILE__, __LINE__, "the reply has no row " + std::to_string(key));
  }
};

Reply read(const World& world, wire::Frame frame) {
  Reply reply{std::move(frame), {}};
  reply.view = wire::decode_changes(view(reply.frame.payload), world.layout);
  return reply;
}

Reply exchange(World& world, size_t rank, const PushSpec& spec) {
  return read(world, world[rank].reply(world.push(rank, spec)));
}

using Keys = std::set<int64_t>;

}  // namespace

TEST(geo_server_replies_with_what_others_changed) {
  World world(deltas(), server_options(3));
  CHECK(exchange(world, 0, moving({3, 9})).keys().empty());
  const Reply second = exchange(world, 1, moving({9}));
  CHECK(second.keys() == (Keys{3, 9}));
  CHECK_EQ(second.row(9), 11.0f);  // its own movement as well
  CHECK_EQ(second.row(3), 4.0f);
  CHECK(exchange(world, 1, moving({9})).keys().empty());
  const Reply third = exchange(world, 0, moving({}));
  CHECK(third.keys() == (Keys{9}));
  CHECK_EQ(third.row(9), 12.0f);
  CHECK(exchange(world, 2, moving({1})).keys() == (Keys{3, 9}));
  CHECK_EQ(third.view.header.members, 3u);
  CHECK_EQ(third.view.header.version.round, 4u);
  CHECK_EQ(third.view.header.version.steps, 4u);
  CHECK_EQ(third.view.blocks.size(), 2u);
}

TEST(geo_server_adds_dense_movement_and_sends_all_of_it) {
  World world(deltas(), server_options(2));
  PushSpec spec;
  spec.blocks[0] = {-1, 0, 2, 0.5};
  spec.blocks[1] = {-0.25, 0, 0};
  const Reply reply = exchange(world, 1, spec);
  float w[4];
  std::memcpy(w, reply.view.blocks[0].values.data(), sizeof(w));
  CHECK(w[0] == 11.0f && w[1] == 11.0f && w[2] == 10.0f && w[3] == 12.5f);
  double d[3];
  std::memcpy(d, reply.view.blocks[1].values.data(), sizeof(d));
  CHECK(d[0] == 10.25 && d[1] == 11.0);
}

TEST(geo_server_tells_the_same_again_when_asked_again) {
  World world(deltas(), server_options(2));
  exchange(world, 0, moving({3, 9}));
  const Buffer payload = make_push(world.layout, moving({5}));
  const auto request = world[1].ask(wire::FrameKind::kPush, payload.share());
  const Reply first = read(world, world[1].reply(request));
  exchange(world, 0, moving({20}));
  world[1].reconnect();
  world[1].reply(world[1].hello(2, 1), wire::FrameKind::kHello);
  const auto again =
      world[1].plain(wire::FrameKind::kPush, 0, payload.share(), world[1].sequence());
  const Reply second = read(world, world[1].reply(again));
  CHECK(second.keys() == first.keys());  // not row 20: that is for the next
  CHECK_EQ(world.row(5)[0], 6.0f);       // moved once
  CHECK_EQ(world.server.stats().duplicates, 1u);
  CHECK(exchange(world, 1, moving({})).keys() == (Keys{20}));
}

TEST(geo_server_splits_what_does_not_fit) {
  server::ServerOptions options = server_options(2);
  options.changes_bytes = 5 * 24;  // rows of 4 floats and a key
  World world(deltas(), options);
  Keys expected;
  std::vector<int64_t> all;
  for (int64_t key = 0; key < 64; key += 5) all.push_back(key);
  exchange(world, 0, moving(all));
  Keys found;
  bool more = true;
  for (int replies = 0; more; ++replies) {
    CHECK(replies < 3);
    const Reply reply = exchange(world, 1, moving({}));
    for (const int64_t key : reply.keys()) {
      CHECK(found.insert(key).second);
      CHECK_EQ(reply.row(key), static_cast<float>(key) + 1.0f);
    }
    more = reply.view.header.more;
  }
  CHECK(found == Keys(all.begin(), all.end()));
  options.changes_bytes = 0;  // every reply gets further
  World narrow(deltas(), options);
  exchange(narrow, 0, moving({1, 2}));
  CHECK(exchange(narrow, 1, moving({})).view.header.more);
  CHECK(!exchange(narrow, 1, moving({})).view.header.more);
}

TEST(geo_server_counts_who_takes_part) {
  World world(deltas(), server_options(3));
  CHECK_EQ(exchange(world, 0, moving({1})).view.header.members, 3u);
  world[1].reply(world[1].ask(wire::FrameKind::kLeave));
  CHECK_EQ(exchange(world, 0, moving({2})).view.header.members, 2u);
  world[1].reply(
      world[1].ask(wire::FrameKind::kJoin, encode(wire::Join{wire::JoinStep::kMember, 0})));
  // What changed meanwhile is not forgotten.
  const Reply back = exchange(world, 1, moving({}));
  CHECK_EQ(back.view.header.members, 3u);
  CHECK(back.keys() == (Keys{1, 2}));
  world[2].reply(world[2].ask(wire::FrameKind::kClose));
  CHECK_EQ(exchange(world, 0, moving({3})).view.header.members, 2u);
  const auto first = world[0].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  CHECK_EQ(exchange(world, 1, moving({4})).view.header.members, 1u);
  const auto second = world[1].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  const auto third = world[2].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  world[0].reply(first);
  world[1].reply(second);
  world[2].reply(third);
  CHECK_EQ(exchange(world, 0, moving({5})).view.header.members, 2u);
}

TEST(geo_server_goes_on_without_a_lost_trainer) {
  server::ServerOptions options = server_options(2);
  options.elastic = true;
  options.reconnect_grace_ms = 30;
  World world(deltas(), options);
  exchange(world, 1, moving({7}));
  world[1].disconnect();
  const TimePoint deadline = Clock::now() + kPatience;
  while (world.server.stats().lost != 1) {
    CHECK(Clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const Reply meanwhile = exchange(world, 0, moving({8}));
  CHECK_EQ(meanwhile.view.header.members, 1u);
  CHECK(meanwhile.keys() == (Keys{7}));  // what it handed on stays
  Trainer newer(world.server, 1, 2);
  newer.reply(newer.hello(2, 1), wire::FrameKind::kHello);
  newer.reply(newer.ask(wire::FrameKind::kOpen, encode(world.layout)));
  newer.reply(newer.ask(wire::FrameKind::kReady));
  // It has pulled everything: nothing from before is told again.
  const Reply back = read(
      world, newer.reply(newer.ask(wire::FrameKind::kPush, make_push(world.layout, moving({})))));
  CHECK(back.keys().empty());
  CHECK_EQ(back.view.header.members, 2u);
  exchange(world, 0, moving({9}));
  const Reply later = read(
      world, newer.reply(newer.ask(wire::FrameKind::kPush, make_push(world.layout, moving({})))));
  CHECK(later.keys() == (Keys{9}));
}

}  // namespace cpudist::testing
