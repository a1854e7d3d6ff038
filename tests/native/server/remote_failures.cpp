// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of remote tables that are made while memory runs out, and while others read them.

#include <cmath>
#include <functional>
#include <random>
#include <set>

#include "support/remote_fixture.h"
#include "support/run_all.h"

namespace cpudist::testing {
namespace {

// What a push that met one failed allocation has come to.
enum class Outcome { kApplied, kRefused, kBroken };

// The set says that nobody can use it any more.
bool is_broken(World& world) {
  const wire::Frame frame =
      world[0].answer(world[0].plain(wire::FrameKind::kPullDense, 0, Buffer()));
  return frame.header.kind == wire::FrameKind::kError &&
         wire::decode_error(view(frame.payload)).code == ErrorCode::kInternal;
}

// Sends it again until it is recorded.
Outcome outcome_of(World& world, uint64_t sequence, const Buffer& push) {
  Trainer& trainer = world[0];
  for (int attempt = 0; attempt < 3; ++attempt) {
    const uint64_t request = trainer.next_request();
    trainer.deliver(trainer.header(wire::FrameKind::kPush, 0, request, sequence), push.share());
    const wire::Frame frame = trainer.answer(request);
    if (is_broken(world)) return Outcome::kBroken;
    if (frame.header.kind == wire::FrameKind::kReply) return Outcome::kApplied;
    const wire::ErrorReply reply = wire::decode_error(view(frame.payload));
    if (reply.code == ErrorCode::kOutOfMemory) return Outcome::kRefused;
    CHECK_EQ(reply.code, ErrorCode::kOverloaded);
  }
  fail(__FILE__, __LINE__, "a push that is refused again and again");
}

// A push that makes rows, with every allocation failing in turn, the slabs and the index included:
// it is applied, or it is refused and may be sent again, or the set says that it cannot be used.
void fail_at_every_allocation(wire::UpdateMode mode, double clip_value) {
  wire::ParamSetLayout layout = remote_layout(adagrad_of(0.25));
  layout.mode = mode;
  wire::PushHeader header;
  header.clip_value = clip_value;
  const std::vector<RowGradient> rows = {{3, 1.0f}, {5, -1.0f}, {60, 0.5f}};
  const std::vector<int64_t> keys = {0, 3, 5, 60};
  World reference(layout, server_options(1), false);
  make_ready(reference);
  const auto before = fetched(reference, keys);
  reference[0].reply(
      reference[0].ask(wire::FrameKind::kPush, remote_push(reference, header, rows)));
  const auto after = fetched(reference, keys);
  int broken = 0;
  int refused = 0;
  int applied_later = 0;
  bool happened = true;
  for (int64_t nth = 0; happened; ++nth) {
    CHECK(nth < 1000);
    World world(layout, server_options(1), false);
    make_ready(world);
    const Buffer push = remote_push(world, header, rows);
    const uint64_t sequence = world[0].sequence() + 1;
    happened = push_without_memory(world, push, nth);
    // It was applied, but its answer found no memory.
    if (is_broken(world)) {
      ++broken;
      continue;
    }
    const bool untouched = world.server.table_stats()[0].rows == 0;
    if (untouched) CHECK(fetched(world, keys) == before);
    switch (outcome_of(world, sequence, push)) {
      case Outcome::kApplied:
        if (untouched) ++applied_later;
        break;
      case Outcome::kRefused:  // recorded as such: the next one is another
        ++refused;
        CHECK(untouched);
        CHECK(outcome_of(world, sequence + 1, push) == Outcome::kApplied);
        break;
      case Outcome::kBroken:
        fail(__FILE__, __LINE__, "broken by a push that is sent again");
    }
    CHECK(fetched(world, keys) == after);
    CHECK_EQ(world.server.table_stats()[0].created, 3u);
  }
  CHECK(refused > 3);
  CHECK(applied_later > 10);
  CHECK(broken < 10);
}

}  // namespace

TEST(remote_rows_are_whole_whatever_allocation_of_an_arrival_fails) {
  fail_at_every_allocation(wire::UpdateMode::kOnArrival, 0);
}

TEST(remote_rows_are_whole_whatever_allocation_of_a_round_fails) {
  fail_at_every_allocation(wire::UpdateMode::kRounds, 0.75);
}

TEST(remote_rows_are_pulled_while_others_make_them) {
  wire::ParamSetLayout layout = remote_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.tables[0].rows = uint64_t{1} << 40;
  layout.tables[0].initial = {{kernels::InitialOp::kFill, 3.0, 0}};  // whole numbers add up exactly
  layout.tables[0].overrides.clear();
  World world(layout, server_options(4, 3), false);
  make_ready(world);
  constexpr int kSteps = kInstrumented ? 40 : 200;
  constexpr int64_t kKeys = 500;
  const auto spread = [](int64_t key) { return key * 1000003; };
  std::vector<std::function<void()>> calls;
  for (size_t rank = 0; rank < 3; ++rank) {
    calls.push_back([&, rank] {
      std::mt19937_64 random(rank);
      for (int step = 0; step < kSteps; ++step) {
        std::set<int64_t> keys;
        while (keys.size() < 20) keys.insert(spread(static_cast<int64_t>(random() % kKeys)));
        std::vector<RowGradient> rows;
        for (const int64_t key : keys) rows.push_back({key, 1.0f});
        world[rank].reply(world[rank].ask(wire::FrameKind::kPush, remote_push(world, {}, rows)));
      }
    });
  }
  std::vector<int64_t> all;
  for (int64_t key = 0; key < 2 * kKeys; ++key) all.push_back(spread(key));
  calls.push_back([&] {
    for (int i = 0; i < kSteps; ++i) {
      const auto rows = pulled_rows(world[3], layout, all);
      for (size_t at = 0; at < rows.size(); at += 4) {
        CHECK(rows[at] <= 3.0f && rows[at] == std::floor(rows[at]));
        CHECK(rows[at + 1] == rows[at] && rows[at + 2] == rows[at] && rows[at + 3] == rows[at]);
      }
    }
  });
  run_all(calls);
  const auto rows = pulled_rows(world[0], layout, all);
  double moved = 0;
  for (size_t at = 0; at < rows.size(); at += 4) moved += 3.0 - double{rows[at]};
  CHECK_EQ(moved, 3.0 * kSteps * 20);
  CHECK(world.server.table_stats()[0].created <= kKeys);
}

}  // namespace cpudist::testing
