// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a server's memory cap counts, and what is refused under it: whole, before anything is made,
// for good where it can never fit, and to be sent again where it may.

#include <algorithm>
#include <string>

#include "support/remote_fixture.h"

namespace cpudist::testing {
namespace {

constexpr uint64_t kSlabBytes = 4u << 20;  // of rows
constexpr uint64_t kRowBytes = 32;         // 16 and 4 floats
constexpr int64_t kSlabRows = kSlabBytes / kRowBytes;

// A remote table that nobody knows the end of.
wire::ParamSetLayout endless_layout(wire::UpdateMode mode) {
  wire::ParamSetLayout layout = remote_layout();
  layout.mode = mode;
  layout.tables[0].rows = uint64_t{1} << 40;
  layout.tables[0].initial = {{kernels::InitialOp::kFill, 3.0, 0}};
  layout.tables[0].overrides.clear();
  return layout;
}

std::vector<RowGradient> rows_from(int64_t begin, int64_t count) {
  std::vector<RowGradient> rows;
  for (int64_t key = begin; key < begin + count; ++key) rows.push_back({key, 1.0f});
  return rows;
}

// `room` bytes beside the values that are there from the start.
server::ServerOptions capped(const wire::ParamSetLayout& layout, uint32_t trainers, uint64_t room) {
  server::ServerOptions options = server_options(trainers);
  options.memory_cap_bytes = values_bytes(layout, options) + room;
  return options;
}

struct Capped : World {
  Capped(const wire::ParamSetLayout& given, uint32_t count, uint64_t room)
      : World(given, capped(given, count, room), false) {
    testing::make_ready(*this);
  }
  uint64_t give(size_t rank, const std::vector<RowGradient>& rows, wire::PushHeader header = {}) {
    return trainers[rank]->ask(wire::FrameKind::kPush, remote_push(*this, header, rows));
  }
  uint64_t rows() const { return server.table_stats()[0].rows; }
  uint64_t memory() const { return server.stats().memory_bytes; }
  float first_of(int64_t key) { return pulled_rows(*trainers[0], layout, {key})[0]; }
};

void check_names_all(const std::string& text, const Capped& world, uint64_t rows) {
  CHECK(contains(text, "table emb: " + std::to_string(rows) + " new rows need "));
  CHECK(contains(text, "memory_cap_bytes = " + std::to_string(world.options.memory_cap_bytes)));
  CHECK(contains(text, "server 0 keeps "));
  CHECK(contains(text, "nothing of the update was applied"));
}

}  // namespace

TEST(memory_cap_counts_rows_index_averages_and_dense_blocks) {
  wire::ParamSetLayout layout = endless_layout(wire::UpdateMode::kOnArrival);
  layout.configs = {adagrad_of(0.5)};
  layout.average_decay = 0.5;
  World world(layout, server_options(1), false);
  make_ready(world);
  const auto kept = [&] {
    const server::ServerStats stats = world.server.stats();
    CHECK_EQ(stats.memory_bytes, stats.table_bytes + stats.dense_bytes);
    return stats.memory_bytes;
  };
  const uint64_t before = kept();
  CHECK_EQ(before, values_bytes(layout, world.options));
  CHECK_EQ(world.server.stats().dense_bytes, 3 * (4 * 4 + 3 * 8));  // weight, state, average
  world[0].reply(world[0].ask(wire::FrameKind::kPush, remote_push(world, {}, rows_from(0, 10))));
  CHECK(kept() >= before + kSlabBytes - 64 + 8 * 10);
}

TEST(memory_cap_counts_slabs_that_are_made_ahead) {
  // A table of which both sides know that it will have more than one slab.
  const wire::ParamSetLayout layout = endless_layout(wire::UpdateMode::kOnArrival);
  Capped world(layout, 1, 4 * kSlabBytes);
  world[0].reply(world.give(0, rows_from(0, kSlabRows / 2 - 1)));
  const uint64_t one = world.memory();
  world[0].reply(world.give(0, rows_from(kSlabRows / 2, 2)));
  CHECK(world.memory() >= one + kSlabBytes);
  CHECK_EQ(world.memory() - world.server.stats().dense_bytes, world.server.stats().table_bytes);
}

TEST(memory_cap_makes_nothing_ahead_that_has_no_room) {
  const wire::ParamSetLayout layout = endless_layout(wire::UpdateMode::kOnArrival);
  Capped world(layout, 1, 2 * kSlabBytes + kSlabBytes / 2);
  world[0].reply(world.give(0, rows_from(0, kSlabRows / 2 + 1)));
  // The index of these rows and the gradients leave less than a second slab.
  world[0].reply(world.give(0, rows_from(kSlabRows / 2 + 1, kSlabRows / 4)));
  CHECK(world.memory() <= world.options.memory_cap_bytes);
}

TEST(memory_cap_refuses_a_push_whose_rows_never_fit_and_makes_none_of_them) {
  Capped world(endless_layout(wire::UpdateMode::kOnArrival), 1, 2 * kSlabBytes);
  const auto before = fetched(world, {0, 1});
  const uint64_t refused = world.give(0, rows_from(0, 3 * kSlabRows));
  // The payload alone exceeds the cap: what to do about it is another matter.
  CHECK(contains(world[0].error(refused, ErrorCode::kInvalidArgument), "merge fewer steps"));
  CHECK_EQ(world.rows(), 0u);
  CHECK(fetched(world, {0, 1}) == before);

  const uint64_t grown = world.give(0, rows_from(0, kSlabRows + 1));
  check_names_all(world[0].error(grown, ErrorCode::kFull), world, kSlabRows + 1);
  CHECK_EQ(world.rows(), 0u);
  CHECK(fetched(world, {0, 1}) == before);

  // It is recorded: the next number is another push, and what fits is applied.
  world[0].reply(world.give(0, rows_from(0, 10)));
  CHECK_EQ(world.rows(), 10u);
  CHECK_EQ(world.first_of(0), 2.0f);
  CHECK(world.memory() <= world.options.memory_cap_bytes);
}

TEST(memory_cap_that_is_full_still_trains_the_rows_that_are_there) {
  Capped world(endless_layout(wire::UpdateMode::kOnArrival), 1, 4 * kSlabBytes);
  int64_t made = 0;
  for (;; made += 16384) {
    const uint64_t request = world.give(0, rows_from(made, 16384));
    if (world[0].answer(request).header.kind == wire::FrameKind::kReply) continue;
    check_names_all(world[0].error(request, ErrorCode::kFull), world, 16384);
    break;
  }
  CHECK(made > kSlabRows);  // what was made ahead is in nobody's way
  CHECK_EQ(world.rows(), static_cast<uint64_t>(made));
  CHECK(world.memory() <= world.options.memory_cap_bytes);
  for (int i = 0; i < 3; ++i) world[0].reply(world.give(0, rows_from(0, 100)));
  CHECK_EQ(world.first_of(0), -1.0f);
  CHECK_EQ(world.first_of(made), 3.0f);  // reading makes none
  CHECK_EQ(world.rows(), static_cast<uint64_t>(made));
}

// Rounds are refused as a whole: everybody is told, in one phase and in two.
TEST(memory_cap_answers_every_trainer_of_a_round_that_never_fits) {
  for (const double clip_norm : {0.0, 100.0}) {
    Capped world(endless_layout(wire::UpdateMode::kRounds), 3, 2 * kSlabBytes);
    wire::PushHeader header;
    header.clip_norm = clip_norm;
    const auto before = fetched(world, {0, 1});
    const int64_t share = kSlabRows / 3 + 1;
    std::vector<uint64_t> requests;
    for (size_t rank = 0; rank < 3; ++rank) {
      const int64_t begin = static_cast<int64_t>(rank) * share;
      requests.push_back(world.give(rank, rows_from(begin, share), header));
    }
    for (size_t rank = 0; rank < 3; ++rank) {
      check_names_all(world[rank].error(requests[rank], ErrorCode::kFull), world, 3 * share);
    }
    CHECK_EQ(world.rows(), 0u);
    CHECK(fetched(world, {0, 1}) == before);
    CHECK_EQ(world.server.stats().pending_bytes, 0u);
    CHECK_EQ(world.server.stats().rounds, 0u);
    // The same round again, with less.
    for (size_t rank = 0; rank < 3; ++rank) {
      requests[rank] = world.give(rank, rows_from(0, 10), header);
    }
    for (size_t rank = 0; rank < 3; ++rank) world[rank].reply(requests[rank]);
    CHECK_EQ(world.rows(), 10u);
  }
}

TEST(memory_cap_tells_the_others_of_a_round_of_a_push_that_can_never_come) {
  Capped world(endless_layout(wire::UpdateMode::kRounds), 2, kSlabBytes);
  const uint64_t waits = world.give(0, rows_from(0, 1));
  CHECK(world[0].waits(waits));
  const uint64_t never = world[1].next_request();
  wire::Frame frame{world[1].header(wire::FrameKind::kPush, 0, never, world[1].sequence() + 1),
                    Buffer(), true};
  frame.header.length = kSlabBytes + 1;  // read past by the channel
  world.server.on_frame(world[1].connection(), std::move(frame));
  CHECK(contains(world[1].error(never, ErrorCode::kFull), "and never will"));
  CHECK(contains(world[0].error(waits, ErrorCode::kFull), "and never will"));
}

TEST(memory_cap_that_pushes_under_way_fill_refuses_for_the_time_being) {
  Capped world(endless_layout(wire::UpdateMode::kOnArrival), 1, 2 * kSlabBytes);
  wire::FrameHeader coming;
  coming.kind = wire::FrameKind::kPush;
  coming.length = kSlabBytes + kSlabBytes / 2;
  Buffer other = world.server.payload_memory(coming, nullptr);
  CHECK_EQ(other.size(), coming.length);
  const uint64_t refused = world.give(0, rows_from(0, 10));
  const std::string text = world[0].error(refused, ErrorCode::kOverloaded);
  check_names_all(text, world, 10);
  CHECK(contains(text, "other pushes under way hold " + std::to_string(coming.length)));
  CHECK_EQ(world.rows(), 0u);
  world[0].take_back();  // not recorded: the same number comes again
  other = Buffer();
  world[0].reply(world.give(0, rows_from(0, 10)));
  CHECK_EQ(world.rows(), 10u);
}

// Whoever waits may wait for the push that makes rows.
TEST(memory_cap_never_refuses_rows_of_what_the_others_wait_for) {
  wire::ParamSetLayout layout = endless_layout(wire::UpdateMode::kOnArrival);
  layout.max_staleness = 1;
  Capped world(layout, 2, 2 * kSlabBytes);
  world[0].reply(world.give(0, rows_from(0, 100000)));  // 2.4 MB of gradients
  const uint64_t held = world.give(0, rows_from(0, 100000));
  CHECK(world[0].waits(held));
  world[1].reply(world.give(1, rows_from(100000, 20000)));
  world[0].reply(held);
  CHECK_EQ(world.rows(), 120000u);
  CHECK(world.memory() <= world.options.memory_cap_bytes + 100000 * 24 + 4096);
}

TEST(memory_cap_gives_up_free_blocks_of_pools_first) {
  Capped world(endless_layout(wire::UpdateMode::kOnArrival), 1, kSlabBytes + (1u << 20));
  std::vector<int64_t> keys(30000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  const uint64_t before = world.memory();
  pulled_rows(world[0], world.layout, keys);  // a reply of 480 kB
  world[0].connection()->forget();
  CHECK(world.memory() >= before + 480000);
  world[0].reply(world.give(0, rows_from(0, 2000)));
  CHECK(world.memory() <= world.options.memory_cap_bytes);
  pulled_rows(world[0], world.layout, keys);
  world[0].connection()->forget();
  CHECK(world.memory() <= world.options.memory_cap_bytes);
}

// ---- layouts, and values that are stored ----

TEST(memory_cap_below_the_values_of_a_layout_is_refused_when_opening) {
  const wire::ParamSetLayout layout = small_layout();
  for (const bool fits : {true, false}) {
    server::ServerOptions options = server_options(1);
    const uint64_t gradients = 4 * sizeof(float) + 3 * sizeof(double);
    const uint64_t needed = values_bytes(layout, options) + gradients;
    options.memory_cap_bytes = fits ? needed : needed - 1;
    server::Server server(options);
    Trainer trainer(server, 0);
    trainer.reply(trainer.hello(1, 1), wire::FrameKind::kHello);
    const uint64_t open = trainer.ask(wire::FrameKind::kOpen, encode(layout));
    if (!fits) {
      const std::string text = trainer.error(open, ErrorCode::kOverloaded);
      CHECK(contains(text, std::to_string(values_bytes(layout, options))));
      CHECK(
          contains(text, "CPUDIST_SERVER_MEMORY_CAP_BYTES to more than " + std::to_string(needed)));
      CHECK_EQ(server.stats().memory_bytes, 0u);
      continue;
    }
    trainer.reply(open);
    CHECK_EQ(server.stats().memory_bytes, values_bytes(layout, options));
    trainer.reply(trainer.ask(wire::FrameKind::kStore, store_all(layout, options)));
    CHECK_EQ(server.stats().memory_bytes, values_bytes(layout, options));
    // A second set has no room beside it.
    const uint64_t second = trainer.ask(wire::FrameKind::kOpen, encode(layout), 1);
    CHECK(contains(trainer.error(second, ErrorCode::kOverloaded), "parameter set 1 needs"));
    trainer.take_back();
    trainer.reply(trainer.ask(wire::FrameKind::kClose));
    CHECK_EQ(server.stats().memory_bytes, 0u);
    trainer.reply(trainer.ask(wire::FrameKind::kOpen, encode(layout), 1));
  }
}

TEST(memory_cap_refuses_rows_that_are_stored_before_any_is) {
  const wire::ParamSetLayout layout = endless_layout(wire::UpdateMode::kRounds);
  World world(layout, capped(layout, 1, kSlabBytes - 1), false);
  const std::vector<int64_t> keys{1, 2, 3};
  const uint64_t request = world[0].ask(wire::FrameKind::kStore, store_begun(world, keys));
  const std::string text = world[0].error(request, ErrorCode::kFull);
  CHECK(contains(text, "table emb: 3 new rows need"));
  CHECK_EQ(world.server.table_stats()[0].rows, 0u);
  CHECK_EQ(world.server.stats().dense_bytes, 0u);
  make_ready(world);  // without rows
}

}  // namespace cpudist::testing
