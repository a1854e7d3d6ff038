// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A snapshot that is being written, and pushes that come meanwhile, on one server: who waits for
// whom, and who has the memory.

#include "support/patience.h"
#include "support/remote_fixture.h"
#include "support/snapshot_fixture.h"

namespace cpudist::testing {
namespace {

wire::CutReply cut_of(Trainer& trainer, uint64_t number) {
  const uint64_t request = trainer.ask(
      wire::FrameKind::kCut,
      encode(wire::Cut{number, 60000, wire::CutStep::kMark, "snap-" + std::to_string(number)}));
  return wire::decode_cut_reply(view(trainer.reply(request).payload));
}

wire::CutStatus status_of(Trainer& trainer, uint64_t number) {
  const TimePoint deadline = Clock::now() + kPatience;
  while (true) {
    const uint64_t request =
        trainer.plain(wire::FrameKind::kCutStatus, 0, encode(wire::CutQuery{number, ""}));
    const wire::CutStatus status = wire::decode_cut_status(view(trainer.reply(request).payload));
    if (status.state != wire::CutState::kWriting) return status;
    CHECK(Clock::now() < deadline);
    let_pass(std::chrono::milliseconds(1));
  }
}

struct Saved {
  std::shared_ptr<MemoryFiles> files = std::make_shared<MemoryFiles>();
  server::ServerOptions options = server_options(1);

  Saved() {
    options.files = files;
    options.snapshot_dir = "/snaps";
  }
};

}  // namespace

TEST(snapshot_makes_pushes_wait_beside_the_thread_that_takes_them_in) {
  Saved saved;
  saved.options.snapshot_memory_bytes = 560 << 10;
  wire::ParamSetLayout layout = snapshot_layout(1, 4000, 8);
  layout.mode = wire::UpdateMode::kOnArrival;
  World world(layout, saved.options);
  Trainer& trainer = world[0];
  Gate gate(*saved.files);
  CHECK(cut_of(trainer, 1).taken);
  gate.wait_reached();
  const auto push = [&](int64_t begin, int64_t end) {
    PushSpec spec;
    spec.configs = layout.configs;
    for (int64_t key = begin; key < end; ++key) spec.tables[0].push_back({key, 1.0f});
    const uint64_t request = world.push(0, spec);
    CHECK(trainer.comes(request));
    trainer.reply(request);
  };
  int64_t pushed = 0;
  while (world.server.stats().snapshot_bytes <= saved.options.snapshot_memory_bytes / 4 * 3) {
    CHECK(pushed < 4000);
    push(pushed, pushed + 100);
    CHECK(trainer.sender() == std::this_thread::get_id());
    pushed += 100;
  }
  CHECK_EQ(world.server.stats().snapshot_waits, 0u);
  for (uint64_t waits = 1; waits <= 2; ++waits) {
    push(0, 1);
    CHECK(trainer.sender() != std::this_thread::get_id());
    CHECK_EQ(world.server.stats().snapshot_waits, waits);
  }
  gate.open();
  CHECK_EQ(status_of(trainer, 1).reason, "");
  push(0, 1);
  CHECK(trainer.sender() == std::this_thread::get_id());
}

TEST(memory_cap_counts_what_a_snapshot_takes_and_refuses_one_that_has_no_room) {
  Saved saved;
  wire::ParamSetLayout layout = snapshot_layout(1, 4000, 8);
  layout.mode = wire::UpdateMode::kOnArrival;
  saved.options.memory_cap_bytes = values_bytes(layout, saved.options) + 10000;
  {
    World world(layout, saved.options);
    const wire::CutReply reply = cut_of(world[0], 1);
    CHECK(!reply.taken);
    CHECK(contains(reply.reason, "snapshot snap-1, server 0 ("));
    CHECK(contains(reply.reason, "CPUDIST_SERVER_MEMORY_CAP_BYTES"));
    PushSpec spec;
    spec.configs = layout.configs;
    spec.tables[0] = {{3, 1.0f}};
    world[0].reply(world.push(0, spec));
  }
  saved.options.memory_cap_bytes += 16 << 20;
  World world(layout, saved.options);
  const auto memory = [&] { return world.server.stats().memory_bytes; };
  const uint64_t before = memory();
  {
    Gate gate(*saved.files);
    CHECK(cut_of(world[0], 1).taken);
    gate.wait_reached();
    CHECK(memory() > before + 4000 * (16 + 2 * 8 * 4));
    gate.open();
    CHECK_EQ(status_of(world[0], 1).reason, "");
  }
  CHECK_EQ(memory(), before);
}

// Rows that pushes make have the memory, and the snapshot is given up.
TEST(memory_cap_gives_a_snapshot_up_for_new_rows) {
  constexpr uint64_t kSlabBytes = 4u << 20;
  constexpr int64_t kSlabRows = kSlabBytes / 32;
  Saved saved;
  wire::ParamSetLayout layout = remote_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.tables[0].rows = uint64_t{1} << 40;
  layout.tables[0].initial = {{kernels::InitialOp::kFill, 3.0, 0}};
  layout.tables[0].overrides.clear();
  // Room for two slabs and a push of their rows, or for one and what writes it.
  saved.options.memory_cap_bytes = values_bytes(layout, saved.options) + 5 * kSlabBytes;
  World world(layout, saved.options, false);
  make_ready(world);
  const auto push = [&](int64_t begin, int64_t count) {
    std::vector<RowGradient> rows;
    for (int64_t key = begin; key < begin + count; ++key) rows.push_back({key, 1.0f});
    world[0].reply(world[0].ask(wire::FrameKind::kPush, remote_push(world, {}, rows)));
  };
  push(0, 10);
  Gate gate(*saved.files);
  CHECK(cut_of(world[0], 1).taken);
  gate.wait_reached();
  push(10, kSlabRows);
  CHECK_EQ(world.server.table_stats()[0].rows, static_cast<uint64_t>(10 + kSlabRows));
  gate.open();
  const wire::CutStatus status = status_of(world[0], 1);
  CHECK_EQ(status.state, wire::CutState::kFailed);
  CHECK(contains(status.reason, "memory_cap_bytes = "));
  CHECK(saved.files->contents().empty());
  push(5, 10);  // training goes on
}

}  // namespace cpudist::testing
