// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Tables whose rows nobody stores: pulls make none, pushes make those that they name, and what is
// trained is what a table would be whose rows had been stored, to the bit.

#include <functional>
#include <string>

#include "server/update/update.h"
#include "support/remote_fixture.h"

namespace cpudist::testing {
namespace {

kernels::OptimizerConfig adam() {
  kernels::OptimizerConfig config;
  config.kind = kernels::OptimizerKind::kAdam;
  config.lr = 0.01;
  config.beta1 = 0.9;
  config.beta2 = 0.99;
  config.eps = 1e-8;
  return config;
}

// A third of the first rows, in any order; the last ones are trained by nobody.
std::vector<RowGradient> some_rows(std::mt19937_64& random) {
  std::vector<RowGradient> rows;
  for (int64_t key = 0; key < kRemoteRows - 10; ++key) {
    const float value = static_cast<float>(random() % 1000) * 0.003f - 1.0f;
    if (random() % 3 == 0) rows.push_back({key, value});
  }
  std::shuffle(rows.begin(), rows.end(), random);
  return rows;
}

std::vector<int64_t> keys_in(const std::vector<RowGradient>& rows) {
  std::vector<int64_t> keys;
  for (const RowGradient& row : rows) keys.push_back(row.key);
  return keys;
}

constexpr uint32_t kTrainers = 3;

// Rounds of all or of groups, every second of them clipped in two phases.
void train_in_rounds(Servers& servers, const std::vector<std::vector<size_t>>& groups) {
  std::mt19937_64 random(4);
  for (uint64_t round = 0; round < 4; ++round) {
    for (const auto& group : groups) {
      wire::PushHeader header;
      header.round = round;
      header.clip_norm = round % 2 == 1 ? 1.5 : 0.0;
      std::vector<std::pair<size_t, std::vector<uint64_t>>> pushed;
      for (const size_t rank : group) {
        header.weight = 1.0 + static_cast<double>(rank);
        pushed.emplace_back(rank, servers.push(rank, header, some_rows(random)));
      }
      if (header.clip_norm > 0) servers.commit(round, pushed);
    }
  }
}

// Trainers that come in any order; each has read before it pushes, which is what compensation
// compares with.
void train_on_arrival(Servers& servers, bool in_turn) {
  std::mt19937_64 random(5);
  std::vector<uint64_t> steps(kTrainers, 0);
  for (size_t event = 0; event < 12; ++event) {
    const size_t rank = in_turn ? event % kTrainers : random() % kTrainers;
    const auto rows = some_rows(random);
    wire::PushHeader header;
    header.step = ++steps[rank];
    servers.pull(rank, keys_in(rows), header.step);
    // Another's update in between.
    if (!in_turn) {
      const size_t other = (rank + 1) % kTrainers;
      wire::PushHeader between;
      between.step = ++steps[other];
      servers.push(other, between, some_rows(random));
    }
    servers.push(rank, header, rows);
  }
}

struct Mode {
  const char* name;
  std::function<void(wire::ParamSetLayout&)> change;
  std::function<void(Servers&)> train;
};

std::vector<Mode> modes() {
  const auto arrivals = [](wire::DelayCompensation compensation) {
    return [compensation](wire::ParamSetLayout& layout) {
      layout.mode = wire::UpdateMode::kOnArrival;
      layout.compensation = compensation;
    };
  };
  const auto in_any_order = [](Servers& servers) { train_on_arrival(servers, false); };
  return {
      {"Sync", [](auto&) {}, [](Servers& servers) { train_in_rounds(servers, {{0, 1, 2}}); }},
      {"HalfAsync", [](wire::ParamSetLayout& layout) { layout.trainer_groups = {0, 0, 1}; },
       [](Servers& servers) { train_in_rounds(servers, {{0, 1}, {2}}); }},
      {"Async", arrivals({}), in_any_order},
      {"Async with a bound",
       [](wire::ParamSetLayout& layout) {
         layout.mode = wire::UpdateMode::kOnArrival;
         layout.max_staleness = kTrainers - 1;
       },
       [](Servers& servers) { train_on_arrival(servers, true); }},
      {"compensated", arrivals({wire::Compensation::kConstant, 0.5, 0, 0}), in_any_order},
      {"adaptively compensated", arrivals({wire::Compensation::kAdaptive, 0.5, 0.9, 1e-7}),
       in_any_order},
  };
}

void check_twins(const Mode& mode, kernels::OptimizerConfig config, double average_decay) {
  wire::ParamSetLayout remote = remote_layout(config);
  remote.average_decay = average_decay;
  mode.change(remote);
  wire::ParamSetLayout stored = remote;
  stored.tables[0] = {"emb", kRemoteRows, 4, 0};
  for (const uint32_t servers : {1u, 3u}) {
    Servers reference(stored, kTrainers, servers, 1);
    mode.train(reference);
    const auto expected = reference.everything();
    for (const uint32_t threads : {1u, 4u}) {
      Servers found(remote, kTrainers, servers, threads);
      CHECK_EQ(found.row_count(), 0u);
      // Every row can be read before anybody has trained it, which makes none.
      std::vector<int64_t> all(kRemoteRows);
      for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
      found.pull(0, all, 0);
      found.everything();
      CHECK_EQ(found.row_count(), 0u);
      mode.train(found);
      if (found.everything() != expected) {
        fail(__FILE__, __LINE__, std::string(mode.name) + ": a remote table is trained otherwise");
      }
      CHECK(found.created() > 0 && found.created() < kRemoteRows);
      CHECK_EQ(found.row_count(), found.created());
    }
  }
}

}  // namespace

TEST(remote_table_is_trained_as_one_whose_rows_are_stored) {
  for (const Mode& mode : modes()) {
    check_twins(mode, adagrad_of(0.25), 0);
    check_twins(mode, adam(), 0);
  }
}

TEST(remote_table_is_averaged_as_one_whose_rows_are_stored) {
  for (const Mode& mode : modes()) check_twins(mode, adagrad_of(0.25), 0.9);
}

TEST(remote_rows_are_numbered_by_rank_and_batch_whatever_the_threads) {
  const wire::ParamSetLayout layout = remote_layout(adagrad_of(0.5));
  const auto push_of = [&](const std::vector<int64_t>& keys) {
    World world(layout, server_options(1), false);
    std::vector<RowGradient> rows;
    for (const int64_t key : keys) rows.push_back({key, 1.0f});
    return remote_push(world, {}, rows);
  };
  const std::vector<int64_t> first = {40, 3, 5, 61};
  const std::vector<int64_t> second = {3, 17, 40, 2};
  std::vector<uint32_t> expected;
  for (const uint32_t threads : {1u, 4u}) {
    table::ParamStore store;
    store.tables.push_back(
        std::make_unique<table::Table>(0, layout.tables[0], layout.configs[0], 0, 1));
    for (uint32_t id = 0; id < layout.blocks.size(); ++id) {
      store.blocks.push_back(
          std::make_unique<table::DenseBlock>(id, layout.blocks[id], layout.configs[0]));
    }
    wire::BlockValues values;
    const std::vector<float> weights(4);
    values.weights = {reinterpret_cast<const uint8_t*>(weights.data()), 16};
    store.blocks[0]->store(values);
    server::UpdatePool pool(threads);
    server::GradientUpdate update(store, pool);
    server::Pushes pushes;
    // The push of the higher rank is located first.
    for (const uint32_t rank : {1u, 0u}) {
      server::Push& push = pushes[rank];
      push.payload = push_of(rank == 0 ? first : second);
      push.view = wire::decode_push(push.payload.bytes(), layout);
      push.sections = server::locate_rows(push.view, store);
    }
    update.prepare(pushes);
    CHECK_EQ(store.tables[0]->row_count(), 0u);
    update.apply(pushes, 0);
    const std::vector<int64_t> keys = {40, 3, 5, 61, 17, 2};
    std::vector<uint32_t> records(keys.size());
    store.tables[0]->find(keys, records.data(), nullptr);
    CHECK(records == (std::vector<uint32_t>{0, 1, 2, 3, 4, 5}));
  }
}

TEST(remote_rows_begin_with_the_seed_of_trainer_zero) {
  wire::ParamSetLayout layout = remote_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  server::ServerOptions options = server_options(2);
  options.elastic = true;
  server::Server server(options);
  const auto open = [&](Trainer& trainer, uint64_t seed) {
    wire::ParamSetLayout own = layout;
    own.tables[0].seed = seed;
    trainer.reply(trainer.hello(2, 1), wire::FrameKind::kHello);
    trainer.reply(trainer.ask(wire::FrameKind::kOpen, encode(own)));
  };
  Trainer second(server, 1);
  open(second, 111);
  Trainer first(server, 0);
  open(first, 222);
  const wire::BlockRef blocks[] = {{0, 16, 0, 0}, {1, 24, 0, 0}};
  first.reply(first.ask(wire::FrameKind::kStore,
                        std::move(wire::layout_store(blocks, {}, nullptr).payload)));
  first.reply(first.ask(wire::FrameKind::kReady));
  second.reply(second.ask(wire::FrameKind::kReady));
  layout.tables[0].seed = 222;
  const std::vector<int64_t> keys = {0, 5, 63};
  CHECK(pulled_rows(second, layout, keys) == begun_rows(layout.tables[0], keys));
  // A trainer 0 that comes back draws another seed; the rows that others have seen stay.
  Trainer again(server, 0, 2);
  open(again, 333);
  again.reply(again.ask(wire::FrameKind::kReady));
  CHECK(pulled_rows(again, layout, keys) == begun_rows(layout.tables[0], keys));
}

TEST(remote_rows_at_the_edges_of_huge_tables) {
  for (const uint64_t rows : {uint64_t{1} << 54, (uint64_t{1} << 62) - 1}) {
    wire::ParamSetLayout layout = remote_layout(adagrad_of(0.25));
    layout.tables[0].rows = rows;
    World world(layout, server_options(1), false);
    make_ready(world);
    const auto last = static_cast<int64_t>(rows - 1);
    const std::vector<int64_t> keys = {0, 1, last / 2, last - 1, last};
    const auto begun = begun_rows(layout.tables[0], keys);
    CHECK(pulled_rows(world[0], layout, keys) == begun);
    CHECK_EQ(world.server.table_stats()[0].rows, 0u);
    CHECK(world.server.table_stats()[0].bytes < 1u << 20);
    world[0].reply(
        world[0].ask(wire::FrameKind::kPush, remote_push(world, {}, {{0, 1}, {last, 1}})));
    const auto found = pulled_rows(world[0], layout, keys);
    CHECK(found[0] < begun[0] && found[16] < begun[16]);
    CHECK(std::equal(found.begin() + 4, found.begin() + 16, begun.begin() + 4));
    const server::TableStats stats = world.server.table_stats()[0];
    CHECK(stats.rows == 2 && stats.created == 2 && stats.remote && stats.name == "emb");
    CHECK(stats.bytes < 10u << 20);
    // One key further, in all that names rows.
    const Buffer push = remote_push(world, {}, {{static_cast<int64_t>(rows), 1}});
    bool refused = false;
    try {
      world[0].ask(wire::FrameKind::kPush, push.share());
    } catch (const Error& error) {
      refused = error.code() == ErrorCode::kProtocol;
    }
    CHECK(refused);
    CHECK_EQ(world.server.table_stats()[0].rows, 2u);
  }
}

TEST(remote_rows_of_another_server_are_refused) {
  server::ServerOptions options = server_options(1);
  options.server_count = 2;
  const wire::ParamSetLayout layout = remote_layout();
  World world(layout, options, false);
  make_ready(world);
  options.shard_id = 1;
  const int64_t foreign = keys_of(layout, options, 0)[0];
  const wire::TableRef ref{0, 1, 4, 0, false, 0};
  wire::FilledKeys pull = wire::layout_pull(std::span(&ref, 1), nullptr);
  pull.keys[0][0] = foreign;
  const auto asked = world[0].plain(wire::FrameKind::kPullRows, 0, std::move(pull.payload));
  CHECK(contains(world[0].error(asked, ErrorCode::kInvalidArgument), "belongs to server 1"));
  const auto pushed =
      world[0].ask(wire::FrameKind::kPush, remote_push(world, {}, {{foreign, 1.0f}}));
  CHECK(contains(world[0].error(pushed, ErrorCode::kInvalidArgument), "belongs to server 1"));
  CHECK_EQ(world.server.table_stats()[0].rows, 0u);
}

TEST(remote_rows_may_be_stored_and_then_are_what_was_stored) {
  const wire::ParamSetLayout layout = remote_layout(adagrad_of(0.25));
  World world(layout, server_options(1), false);
  const wire::TableRef ref{0, 2, 4, 0, false, 0};
  wire::FilledStore store = wire::layout_store({}, std::span(&ref, 1), nullptr);
  store.keys[0][0] = 7;
  store.keys[0][1] = 5;
  std::fill_n(store.weights[0], 8, 2.5f);
  world[0].reply(world[0].ask(wire::FrameKind::kStore, std::move(store.payload)));
  make_ready(world);
  const auto begun = begun_rows(layout.tables[0], {7, 8});
  const std::vector<float> stored(4, 2.5f);
  CHECK(world.row(7) == stored && world.row(5) == stored);
  CHECK(world.row(8) == std::vector<float>(begun.begin() + 4, begun.end()));
  const server::TableStats stats = world.server.table_stats()[0];
  CHECK(stats.rows == 2 && stats.created == 0);
}

TEST(remote_rows_are_not_made_by_a_round_of_weight_zero) {
  World world(remote_layout(), server_options(2), false);
  make_ready(world);
  wire::PushHeader header;
  header.weight = 0;
  for (size_t rank = 0; rank < 2; ++rank) {
    world[rank].ask(wire::FrameKind::kPush, remote_push(world, header, {{3, 1.0f}}));
  }
  CHECK_EQ(world.server.stats().rounds, 1u);
  CHECK_EQ(world.server.table_stats()[0].rows, 0u);
}

// A trainer holds rows of its next batch while it pushes: the reply brings those that the round
// has changed, also when there was none at the time of the push.
TEST(remote_rows_that_are_held_come_with_the_reply_once_somebody_trains_them) {
  const wire::ParamSetLayout layout = remote_layout();
  World world(layout, server_options(2), false);
  make_ready(world);
  wire::PushHeader header;
  header.configs = layout.configs;
  wire::HoldRefs holds;
  holds.tables = {{0, 3, 4, 0, false, 0}};
  wire::FilledPush push = wire::layout_push(header, {}, {}, nullptr, &holds);
  const std::vector<int64_t> held = {20, 3, 40};
  std::copy(held.begin(), held.end(), push.held[0]);
  const auto waiting = world[0].ask(wire::FrameKind::kPush, std::move(push.payload));
  world[1].ask(wire::FrameKind::kPush, remote_push(world, {}, {{3, 1.0f}, {4, 1.0f}}));
  const wire::Frame frame = world[0].reply(waiting);
  const wire::DenseView reply = world.dense(frame);
  CHECK_EQ(reply.tables.size(), 1u);
  CHECK(std::vector<int64_t>(reply.tables[0].keys.begin(), reply.tables[0].keys.end()) ==
        std::vector<int64_t>{3});
  CHECK(std::vector<float>(reply.tables[0].rows.begin(), reply.tables[0].rows.end()) ==
        world.row(3));
  CHECK_EQ(world.server.table_stats()[0].rows, 2u);
}

// Its sender is frozen, or waits: what was missing when the push came is looked for again.
TEST(remote_rows_of_a_push_that_waits_may_have_been_made_by_others) {
  for (const bool in_rounds : {false, true}) {
    wire::ParamSetLayout layout = remote_layout();
    layout.tables[0].initial = {{kernels::InitialOp::kFill, 3.0, 0}};
    if (in_rounds) {
      layout.trainer_groups = {0, 1, 0};
    } else {
      layout.mode = wire::UpdateMode::kOnArrival;
      layout.max_staleness = 2;
    }
    World world(layout, server_options(3), false);
    make_ready(world);
    const auto push = [&](size_t rank, const std::vector<RowGradient>& rows) {
      return world[rank].ask(wire::FrameKind::kPush, remote_push(world, {}, rows));
    };
    if (!in_rounds) {
      world[0].reply(push(0, {{1, 1.0f}}));
      world[1].reply(push(1, {{1, 1.0f}}));
    }
    // Located while there is no row 7 and no row 8; it waits for trainer 2.
    const auto held = push(0, {{7, 1.0f}, {8, 1.0f}});
    CHECK(world[0].waits(held));
    if (in_rounds) {
      world[1].reply(push(1, {{7, 1.0f}, {9, 1.0f}}));
      world[2].reply(push(2, {{7, 1.0f}, {10, 1.0f}}));
    } else {
      world[2].reply(push(2, {{7, 1.0f}, {9, 1.0f}, {10, 1.0f}}));
    }
    world[0].reply(held);
    const auto rows = pulled_rows(world[1], layout, {7, 8, 9, 10});
    const float one = in_rounds ? 0.5f : 1.0f;  // of a gradient of the group of two
    const std::vector<float> expected = {1.0f, 3.0f - one, 2.0f, 3.0f - one};
    for (size_t i = 0; i < expected.size(); ++i) {
      for (size_t c = 0; c < 4; ++c) CHECK_EQ(rows[i * 4 + c], expected[i]);
    }
    CHECK_EQ(world.server.table_stats()[0].created, in_rounds ? 4u : 5u);
    CHECK_EQ(world.server.table_stats()[0].rows, in_rounds ? 4u : 5u);
  }
}

}  // namespace cpudist::testing
