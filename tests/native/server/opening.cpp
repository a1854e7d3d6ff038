// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Opening, storing, reading and closing a parameter set, and the refusals of pushes.

#include "server/layout/layout_checks.h"
#include "support/server_fixture.h"

namespace cpudist::testing {

TEST(server_open_refuses_another_layout_and_says_where) {
  World world(small_layout(), server_options(2), false);
  const auto try_layout = [](const wire::ParamSetLayout& layout) {
    World fresh(small_layout(), server_options(1), false);
    Trainer& trainer = fresh[0];
    trainer.ask(wire::FrameKind::kOpen, encode(small_layout()), 1);
    const auto id = trainer.ask(wire::FrameKind::kOpen, encode(layout), 1);
    return trainer.error(id, ErrorCode::kConfigMismatch);
  };
  wire::ParamSetLayout layout = small_layout();
  layout.tables[0].rows = 65;
  CHECK(contains(try_layout(layout), "table 0 (emb), rows: 64 against 65"));
  layout = small_layout();
  layout.blocks[1].dtype = wire::DType::kFloat32;
  CHECK(contains(try_layout(layout), "block 1 (d), dtype"));
  layout = small_layout();
  layout.configs[0].lr = 0.5;
  CHECK(contains(try_layout(layout), "parameter group 0, lr: 1 against 0.5"));
  layout = small_layout();
  layout.blocks.pop_back();
  CHECK(contains(try_layout(layout), "number of blocks: 2 against 1"));
}

TEST(server_open_compares_programs_but_not_seeds) {
  using Op = kernels::InitialOp;
  wire::ParamSetLayout remote = small_layout();
  remote.tables[0].remote = true;
  remote.tables[0].seed = 3;
  remote.tables[0].initial = {{Op::kNormal, 0, 0.1}};
  const auto open_twice = [&](const wire::ParamSetLayout& other, auto&& judge) {
    World fresh(small_layout(), server_options(1), false);
    Trainer& trainer = fresh[0];
    trainer.ask(wire::FrameKind::kOpen, encode(remote), 1);
    judge(trainer, trainer.ask(wire::FrameKind::kOpen, encode(other), 1));
  };
  const auto difference = [&](const wire::ParamSetLayout& other) {
    std::string text;
    open_twice(other, [&](Trainer& trainer, uint64_t id) {
      text = trainer.error(id, ErrorCode::kConfigMismatch);
    });
    return text;
  };
  wire::ParamSetLayout other = remote;
  other.tables[0].initial[0].b = 0.2;
  CHECK(contains(difference(other),
                 "table 0 (emb), initial values: normal(0, 0.1) against normal(0, 0.2)"));
  other = remote;
  other.tables[0].initial.push_back({Op::kMul, 2, 0});
  CHECK(contains(difference(other), "initial values: none against mul(2, 0)"));
  other = remote;
  other.tables[0].overrides = {{0, 1, 0}};
  CHECK(contains(difference(other), "constant rows: none against rows 0 to 1 are 0"));
  other = small_layout();
  CHECK(contains(difference(other), "table 0 (emb), remote: 1 against 0"));
  other = remote;
  other.tables[0].seed = 4;
  other.tables[0].dim = 5;
  CHECK(contains(difference(other), "table 0 (emb), dim: 4 against 5"));
  other = remote;
  other.tables[0].seed = 4;
  open_twice(other, [](Trainer& trainer, uint64_t id) {  // the same layout: opened a second time
    CHECK(contains(trainer.error(id, ErrorCode::kProtocol), "twice"));
  });
}

TEST(server_open_compares_what_only_remote_tables_have) {
  wire::ParamSetLayout remote = small_layout();
  remote.tables[0].remote = true;
  const auto difference = [&](const auto& change) {
    wire::ParamSetLayout other = remote;
    change(other.tables[0]);
    return server::describe_difference(remote, other);
  };
  CHECK(contains(difference([](auto& t) { t.open = true; }), "table 0 (emb), open: 0 against 1"));
  CHECK(contains(difference([](auto& t) { t.unknown_zeros = true; }),
                 "zeros for unknown keys: 0 against 1"));
  CHECK(
      contains(difference([](auto& t) { t.max_rows = 5; }), "max_rows (0 for none): 0 against 5"));
  CHECK(contains(difference([](auto& t) { t.admission.kind = wire::AdmissionKind::kCount; }),
                 "admission (0 all, 1 by count, 2 by chance): 0 against 1"));
  CHECK(contains(difference([](auto& t) { t.admission.count = 2; }),
                 "pushes before admission: 0 against 2"));
  CHECK(contains(difference([](auto& t) { t.admission.probability = 0.5; }),
                 "probability of admission: 1 against 0.5"));
  CHECK(contains(difference([](auto& t) { t.admission.sketch_bytes = 64; }),
                 "sketch of admission: 0 against 64"));
  CHECK(contains(difference([](auto& t) { t.eviction.on = true; }), "eviction: 0 against 1"));
  CHECK(contains(difference([](auto& t) { t.eviction.unseen_steps = 5; }), "unseen steps"));
  CHECK(contains(difference([](auto& t) { t.eviction.unseen_ms = 5; }), "unseen ms"));
  CHECK(contains(difference([](auto& t) { t.eviction.min_count = 5; }), "min_count"));
  CHECK(contains(difference([](auto& t) { t.eviction.max_rows = 5; }), "eviction, max_rows"));
  CHECK(contains(difference([](auto& t) { t.eviction.order = wire::EvictionOrder::kLfu; }),
                 "eviction, order (0 lru, 1 lfu): 0 against 1"));
}

TEST(server_open_that_differs_ends_rounds_that_wait_for_it) {
  World world(small_layout(), server_options(2), false);
  Trainer& first = world[0];
  first.reply(first.ask(wire::FrameKind::kOpen, encode(small_layout()), 1));
  first.reply(first.ask(wire::FrameKind::kStore, store_all(world.layout, world.options), 1));
  first.reply(first.ask(wire::FrameKind::kReady, Buffer(), 1));
  const auto push = first.ask(wire::FrameKind::kPush, make_push(world.layout, {}), 1);
  CHECK(first.waits(push));
  wire::ParamSetLayout other = small_layout();
  other.tables[0].rows = 65;
  const auto open = world[1].ask(wire::FrameKind::kOpen, encode(other), 1);
  const auto text = world[1].error(open, ErrorCode::kConfigMismatch);
  CHECK_EQ(first.error(push, ErrorCode::kConfigMismatch), text);
  const auto later = first.ask(wire::FrameKind::kPush, make_push(world.layout, {}), 1);
  CHECK_EQ(first.error(later, ErrorCode::kConfigMismatch), text);
}

TEST(server_open_refuses_what_it_cannot_serve) {
  World world(small_layout(), server_options(1), false);
  wire::ParamSetLayout layout = small_layout();
  layout.blocks[0].shard = 3;
  const auto id = world[0].ask(wire::FrameKind::kOpen, encode(layout), 1);
  CHECK(contains(world[0].error(id, ErrorCode::kInvalidArgument), "no server 3"));
  const auto twice = world[0].ask(wire::FrameKind::kOpen, encode(small_layout()));
  CHECK(contains(world[0].error(twice, ErrorCode::kProtocol), "twice"));
}

TEST(server_nothing_is_served_before_ready) {
  World world(small_layout(), server_options(2), false);
  const auto waiting = world[1].ask(wire::FrameKind::kReady);
  CHECK(world[1].waits(waiting));
  world[0].error(world[0].plain(wire::FrameKind::kPullDense, 0, Buffer()),
                 ErrorCode::kInvalidArgument);
  wire::FetchRequest fetch;
  fetch.blocks = true;
  world[0].error(world[0].plain(wire::FrameKind::kFetchState, 0, encode(fetch)),
                 ErrorCode::kInvalidArgument);
  const auto push = world.push(0, {});
  CHECK(contains(world[0].error(push, ErrorCode::kInvalidArgument), "not ready"));
  const auto incomplete = world[0].ask(wire::FrameKind::kReady);
  CHECK(contains(world[0].error(incomplete, ErrorCode::kInvalidArgument), "block w"));
  world[0].reply(world[0].ask(wire::FrameKind::kStore, store_all(world.layout, world.options)));
  world[0].reply(world[0].ask(wire::FrameKind::kReady));
  CHECK_EQ(world[1].round_of(waiting), 0u);
  CHECK_EQ(world.row(63)[1], initial_weight(63, 1));
  const auto stats = world.server.stats();
  CHECK_EQ(stats.rows, 64u);
  CHECK_EQ(stats.dense_bytes, 16u + 24u);
  CHECK(stats.table_bytes > 64u * 32u);
}

TEST(server_only_trainer_zero_stores) {
  World world(2);
  const auto id = world[1].ask(wire::FrameKind::kStore, store_all(world.layout, world.options));
  world[1].error(id, ErrorCode::kInvalidArgument);
}

TEST(server_a_later_store_overwrites) {
  World world(1);
  PushSpec spec;
  spec.blocks[0] = {1, 1, 1, 1};
  spec.tables[0] = {{5, 1.0f}};
  world.push(0, spec);
  world[0].reply(world[0].ask(wire::FrameKind::kStore, store_all(world.layout, world.options)));
  CHECK_EQ(world.floats(0)[0], 10.0f);
  CHECK_EQ(world.row(5)[0], initial_weight(5, 0));
  CHECK_EQ(world.server.stats().rows, 64u);
}

TEST(server_store_of_a_foreign_block_is_refused) {
  wire::ParamSetLayout layout = small_layout();
  server::ServerOptions options = server_options(1);
  options.server_count = 2;
  options.shard_id = 1;
  World world(layout, options);
  options.shard_id = 0;
  const auto id = world[0].ask(wire::FrameKind::kStore, store_all(layout, options));
  CHECK(contains(world[0].error(id, ErrorCode::kInvalidArgument), "belongs to server 0"));
  PushSpec spec;
  spec.blocks[0] = {1, 1, 1, 1};
  const auto push = world.push(0, spec);
  CHECK(contains(world[0].error(push, ErrorCode::kInvalidArgument), "another server"));
}

TEST(server_pull_and_push_of_a_missing_row_name_table_and_row) {
  server::ServerOptions options = server_options(1);
  options.server_count = 2;
  wire::ParamSetLayout layout = small_layout();
  World world(layout, options);
  int64_t missing = 0;
  while (wire::owner_of_bucket(
             kernels::bucket_of(missing, kernels::table_salt(world.layout.tables[0].name)), 2) == 0)
    ++missing;
  const wire::TableRef ref{0, 1, 4, 0, false, 0};
  wire::FilledKeys pull = wire::layout_pull(std::span(&ref, 1), nullptr);
  pull.keys[0][0] = missing;
  const auto id = world[0].plain(wire::FrameKind::kPullRows, 0, std::move(pull.payload));
  const auto text = world[0].error(id, ErrorCode::kInvalidArgument);
  CHECK(contains(text, "emb") && contains(text, "row " + std::to_string(missing)));
  PushSpec spec;
  spec.tables[0] = {{missing, 1.0f}};
  world[0].error(world.push(0, spec), ErrorCode::kInvalidArgument);
  CHECK_EQ(world.server.stats().pending_bytes, 0u);
}

TEST(server_push_refusals) {
  World world(2);
  PushSpec spec;
  spec.round = 4;
  const auto text = world[0].error(world.push(0, spec), ErrorCode::kProtocol);
  CHECK(contains(text, "round 4") && contains(text, "current one is 0"));
  spec.round = 0;
  spec.configs[0].momentum = 0.9;
  CHECK(contains(world[0].error(world.push(0, spec), ErrorCode::kConfigMismatch), "momentum"));
  world[0].error(world[0].ask(wire::FrameKind::kPush, make_push(world.layout, {}), 9),
                 ErrorCode::kInvalidArgument);
  CHECK_EQ(world.server.stats().rounds, 0u);
}

TEST(server_round_of_different_settings_fails_for_all) {
  const auto run = [](const PushSpec& a, const PushSpec& b) {
    World world(3);
    const auto first = world.push(0, a);
    const auto second = world.push(2, b);
    const auto third = world.push(1, a);
    const auto text = world[0].error(first, ErrorCode::kConfigMismatch);
    CHECK_EQ(world[1].error(third, ErrorCode::kConfigMismatch), text);
    CHECK_EQ(world[2].error(second, ErrorCode::kConfigMismatch), text);
    CHECK_EQ(world.server.stats().pending_bytes, 0u);
    CHECK_EQ(world.floats(0)[0], 10.0f);
    for (size_t rank = 0; rank < 3; ++rank) world.push(rank, {});  // the round is still to come
    CHECK_EQ(world.server.stats().rounds, 1u);
    return text;
  };
  PushSpec a, b;
  a.blocks[0] = b.blocks[0] = {1, 1, 1, 1};
  b.configs[0].lr = 0.5;
  auto text = run(a, b);
  CHECK(contains(text, "lr: 1 against 0.5"));
  CHECK(contains(text, "trainer 0 against trainer 2"));
  b = a;
  b.clip_value = 2;
  CHECK(contains(run(a, b), "clip_value: 0 against 2"));
  b = a;
  b.clip_norm = 2;
  CHECK(contains(run(a, b), "clip_norm: 0 against 2"));
  a.clip_norm = 2;
  b.clip_each = true;
  CHECK(contains(run(a, b), "one clips each tensor by its own norm"));
}

TEST(server_close_by_all_frees_the_set) {
  World world(2);
  world[0].reply(world[0].ask(wire::FrameKind::kClose));
  CHECK_EQ(world.server.stats().rows, 64u);
  world[0].error(world.push(0, {}), ErrorCode::kInvalidArgument);
  world[1].reply(world[1].ask(wire::FrameKind::kClose));
  CHECK_EQ(world.server.stats().rows, 0u);
  world[1].error(world[1].ask(wire::FrameKind::kClose), ErrorCode::kInvalidArgument);
}

TEST(server_close_takes_out_of_rounds) {
  World world(2);
  const auto push = world.push(0, {});
  CHECK(world[0].waits(push));
  world[1].ask(wire::FrameKind::kClose);
  CHECK_EQ(world.dense(world[0].reply(push)).version.round, 1u);
}

TEST(server_close_before_ready_fails_those_who_wait) {
  World world(small_layout(), server_options(2), false);
  const auto ready = world[1].ask(wire::FrameKind::kReady);
  world[0].ask(wire::FrameKind::kClose);
  world[1].error(ready, ErrorCode::kClosed);
}

TEST(server_stop_answers_what_waits_and_refuses_the_rest) {
  World world(2);
  const auto push = world.push(0, {});
  world.server.stop();
  world[0].error(push, ErrorCode::kPeerLost);
  world[0].error(world.push(0, {}), ErrorCode::kPeerLost);
  world[0].error(world[0].plain(wire::FrameKind::kPullDense, 0, Buffer()), ErrorCode::kPeerLost);
  CHECK_THROWS(world.server.wait_done(Clock::now() + std::chrono::seconds(10)), Error);
  Trainer late(world.server, 1, 2);
  late.error(late.hello(2, 1), ErrorCode::kPeerLost);
}

}  // namespace cpudist::testing
