// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Loading what was saved: the same bits on any number of servers, and nothing of what is damaged.

#include <limits>

#include "support/snapshot_fixture.h"

namespace cpudist::testing {
namespace {

using Rigs = std::vector<std::unique_ptr<Rig>>;

Rigs make_servers(const wire::ParamSetLayout& layout, uint32_t count) {
  Rigs made;
  for (uint32_t shard = 0; shard < count; ++shard) {
    made.push_back(std::make_unique<Rig>(layout, shard, count));
  }
  return made;
}

// All files of a snapshot of some servers, as their status tells them.
std::vector<wire::CutFile> save(const Rigs& servers, const std::shared_ptr<MemoryFiles>& files) {
  std::vector<wire::CutFile> told;
  for (const auto& rig : servers) {
    server::SnapshotWriter writer(writer_options(files, rig->shard));
    rig->begin(writer, 1, "snap-1");
    const wire::CutStatus status = status_at_end(writer, 1);
    CHECK_EQ(status.reason, "");
    told.insert(told.end(), status.files.begin(), status.files.end());
  }
  return told;
}

void load_all(Rig& rig, MemoryFiles& files, const std::vector<wire::CutFile>& told,
              uint64_t table_step) {
  const auto contents = files.contents();
  for (const wire::CutFile& file : told) {
    if (file.table == wire::kDenseFile) continue;
    wire::Load load = load_of(rig, file, contents.at("/snaps/snap-1/" + file.name), "snap-1");
    load.table_step = table_step;
    // As it comes over the wire.
    load_rows(rig, files, wire::decode_load(view(encode(load)), rig.layout));
  }
}

std::vector<RowsByKey> joined(const Rigs& servers) {
  std::vector<RowsByKey> all(servers[0]->layout.tables.size());
  for (const auto& rig : servers) {
    for (uint32_t table = 0; table < all.size(); ++table) {
      for (auto& [key, bytes] : rig->rows(table)) CHECK(all[table].emplace(key, bytes).second);
    }
  }
  return all;
}

// A server with one part of a table, which is loaded over the wire.
struct LoadedWorld {
  std::shared_ptr<MemoryFiles> files = std::make_shared<MemoryFiles>();
  Rig saved;
  std::vector<wire::CutFile> told;
  server::ServerOptions options = server_options(1);
  std::unique_ptr<World> world;

  explicit LoadedWorld(wire::ParamSetLayout layout) : saved(layout) {
    saved.store_values();
    std::mt19937 random(8);
    for (int i = 0; i < 5; ++i) saved.push_some(random, 8);
    server::SnapshotWriter writer(writer_options(files));
    saved.begin(writer, 1, "snap-1");
    told = status_at_end(writer, 1).files;
    options.files = files;
    options.snapshot_dir = "/snaps";
    world = std::make_unique<World>(layout, options);
  }
  wire::Load load(size_t file) const {
    return load_of(saved, told[file], files->contents().at("/snaps/snap-1/" + told[file].name),
                   "snap-1");
  }
  uint64_t ask(const wire::Load& load) {
    return (*world)[0].ask(wire::FrameKind::kLoad, encode(load));
  }
  std::vector<float> saved_row(uint32_t table, int64_t key) const {
    std::vector<float> row(saved.layout.tables[table].dim);
    saved.store.tables[table]->gather(std::span(&key, 1), row.data());
    return row;
  }
};

}  // namespace

TEST(snapshot_of_an_open_table_has_keys_of_both_signs) {
  wire::ParamSetLayout layout = snapshot_layout(2, 1, 5);
  layout.blocks.clear();
  layout.tables.erase(layout.tables.begin());  // the remote one is left
  layout.tables[0].open = true;
  const Rigs source = make_servers(layout, 1);
  std::mt19937_64 random(17);
  for (int i = 0; i < 6; ++i) {
    std::set<int64_t> keys = {std::numeric_limits<int64_t>::min(), -1, 0,
                              std::numeric_limits<int64_t>::max()};
    while (keys.size() < 300) keys.insert(static_cast<int64_t>(random()));
    source[0]->push({{keys.begin(), keys.end()}});
  }
  const auto files = std::make_shared<MemoryFiles>();
  const auto told = save(source, files);
  const auto expected = joined(source);
  CHECK(expected[0].size() > 1700);
  for (const uint32_t after : {1u, 3u}) {
    const Rigs target = make_servers(layout, after);
    for (const auto& rig : target) load_all(*rig, *files, told, 6);
    CHECK(joined(target) == expected);
  }
}

TEST(snapshot_loads_bit_for_bit_on_any_number_of_servers) {
  for (const double decay : {0.0, 0.75}) {
    wire::ParamSetLayout layout = snapshot_layout(3, 300, 5, decay);
    layout.blocks.clear();
    for (const uint32_t before : {1u, 2u, 3u}) {
      const Rigs source = make_servers(layout, before);
      std::mt19937 random(before);
      for (const auto& rig : source) {
        rig->store_values();
        for (int i = 0; i < 12; ++i) rig->push_some(random, 20);
      }
      const auto files = std::make_shared<MemoryFiles>();
      const auto told = save(source, files);
      const auto expected = joined(source);
      for (const uint32_t after : {1u, 2u, 3u}) {
        const Rigs target = make_servers(layout, after);
        for (const auto& rig : target) load_all(*rig, *files, told, 12);
        CHECK(joined(target) == expected);
        for (const auto& rig : target) CHECK_EQ(rig->store.tables[0]->step(), 12u);
      }
    }
  }
}

// A static table's rows may be loaded as those of a remote one, and the other way round.
TEST(snapshot_of_a_static_table_loads_as_a_remote_one) {
  wire::ParamSetLayout layout = snapshot_layout(1, 200, 3);
  layout.blocks.clear();
  const Rigs source = make_servers(layout, 2);
  for (const auto& rig : source) rig->store_values();
  const auto files = std::make_shared<MemoryFiles>();
  const auto told = save(source, files);
  layout.tables[0].remote = true;
  layout.tables[0].initial = {{kernels::InitialOp::kNormal, 0.0, 0.5}};
  const Rigs target = make_servers(layout, 3);
  for (const auto& rig : target) load_all(*rig, *files, told, 1);
  CHECK(joined(target) == joined(source));
}

// Averages after more updates are those of a run that was never saved.
TEST(snapshot_averages_go_on_as_if_nothing_had_been) {
  wire::ParamSetLayout layout = snapshot_layout(2, 60, 4, 0.9);
  Rig first(layout);
  first.store_values();
  std::mt19937 random(5);
  for (int i = 0; i < 30; ++i) first.push_some(random, 7);
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  first.begin(writer, 1, "snap-1");
  Rig second(layout);
  second.store_values();
  second.version = first.version;
  for (const auto& table : second.store.tables) table->clear();
  load_all(second, *files, status_at_end(writer, 1).files, 30);
  for (const auto& block : second.store.blocks) {
    const table::DenseBlock& from = *first.store.blocks[block->id()];
    const Bytes average = first.dense().at(from.spec().name + ".average");
    wire::BlockValues values;
    values.weights = from.weight();
    values.state = from.state();
    values.average = average;
    values.step = from.step();
    block->store(values, second.version.round);
  }
  CHECK(first.dense() == second.dense());
  std::mt19937 again = random;
  for (int i = 0; i < 30; ++i) {
    first.push_some(random, 7);
    second.push_some(again, 7);
  }
  CHECK(first.all_rows() == second.all_rows());
  CHECK(first.dense() == second.dense());
}

TEST(snapshot_block_averages_follow_a_new_count_of_updates) {
  Rig rig(snapshot_layout(1, 10, 2, 0.5));
  rig.store_values();
  std::mt19937 random(5);
  for (int i = 0; i < 4; ++i) rig.push_some(random, 2);
  const auto before = rig.dense();
  for (const auto& block : rig.store.blocks) block->renumber(4, 1000);
  rig.version.round = 1000;
  CHECK(rig.dense() == before);
  for (const auto& block : rig.store.blocks) block->renumber(1000, 2);
  rig.version.round = 2;
  CHECK(rig.dense() == before);
}

TEST(snapshot_load_creates_overwrites_and_drops_rows) {
  LoadedWorld loaded(snapshot_layout(2, 64, 4));
  World& world = *loaded.world;
  // The rows of a remote table that were pushed before go, and what it began with is back.
  PushSpec spec;
  spec.configs = world.layout.configs;
  for (int64_t key = 0; key < 64; ++key) spec.tables[1].push_back({key, 1.0f});
  world[0].reply(world.push(0, spec));
  wire::Load load = loaded.load(1);
  CHECK_EQ(load.table, 1u);
  load.kind = wire::LoadKind::kReplace;
  load.table_step = 5;
  world[0].reply(loaded.ask(load));
  uint64_t begun = 0;
  const auto saved = loaded.saved.rows(1);
  for (int64_t key = 0; key < 64; ++key) {
    CHECK(world.row(key, 1) == loaded.saved_row(1, key));
    begun += saved.contains(key) ? 0 : 1;
  }
  CHECK(begun > 0);
  CHECK_EQ(world.server.table_stats()[1].rows, saved.size());
  // Again, over those that are there.
  load.kind = wire::LoadKind::kRows;
  world[0].reply(loaded.ask(load));
  CHECK_EQ(world.server.table_stats()[1].rows, saved.size());
  // Dropped, and nothing loaded.
  wire::Load drop;
  drop.table = 1;
  drop.kind = wire::LoadKind::kReplace;
  world[0].reply(loaded.ask(drop));
  CHECK_EQ(world.server.table_stats()[1].rows, 0u);
  world[0].reply(world.push(0, [&] {
    PushSpec next = spec;
    next.round = 1;
    return next;
  }()));
  CHECK_EQ(world.server.table_stats()[1].rows, 64u);
}

TEST(snapshot_version_sets_the_next_round) {
  LoadedWorld loaded(snapshot_layout(1, 16, 2));
  World& world = *loaded.world;
  wire::Load load;
  load.kind = wire::LoadKind::kVersion;
  load.version = {100, 3200, 200};
  CHECK_EQ(world[0].round_of(loaded.ask(load)), 100u);
  const wire::Frame frame =
      world[0].reply(world[0].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet));
  const auto rounds = wire::decode_barrier_reply(view(frame.payload)).rounds;
  CHECK_EQ(rounds.size(), 1u);
  CHECK_EQ(rounds[0].second, 100u);
  PushSpec spec;
  spec.configs = world.layout.configs;
  spec.tables[0] = {{3, 1.0f}};
  spec.blocks[0] = {1, 1, 1, 1};
  spec.round = 100;
  const wire::DenseView dense = world.dense(world[0].reply(world.push(0, spec)));
  CHECK_EQ(dense.version.round, 101u);
}

TEST(snapshot_damaged_in_any_chunk_is_refused_by_name) {
  LoadedWorld loaded(snapshot_layout(1, 16384, 16));
  World& world = *loaded.world;
  const std::string path = "/snaps/snap-1/" + loaded.told[0].name;
  const wire::Load load = loaded.load(0);
  const size_t size = loaded.files->contents().at(path).size();
  CHECK(size > 4 * wire::kChecksumBytes);
  const auto before = world.row(7);
  const size_t first = tensors_of(loaded.files->contents().at(path)).at("keys").begin;
  const size_t last = tensors_of(loaded.files->contents().at(path)).at("last_seen").end - 1;
  for (size_t piece = 0; piece * wire::kChecksumBytes <= last; ++piece) {
    const size_t at = std::clamp(piece * wire::kChecksumBytes + 1234, first, last);
    loaded.files->flip(path, at);
    const std::string text = world[0].error(loaded.ask(load), ErrorCode::kSnapshotCorrupt);
    CHECK(contains(text, path));
    CHECK(contains(text,
                   "bytes " + std::to_string(at / wire::kChecksumBytes * wire::kChecksumBytes)));
    CHECK(contains(text, "expected 0x"));
    loaded.files->flip(path, at);
  }
  CHECK(world.row(7) == before);  // nothing of it was taken
  wire::Load shorter = load;
  shorter.file_bytes -= 1;
  CHECK(contains(world[0].error(loaded.ask(shorter), ErrorCode::kSnapshotCorrupt), "bytes"));
  wire::Load missing = load;
  missing.file = "s009-t000-0000.safetensors";
  CHECK(contains(world[0].error(loaded.ask(missing), ErrorCode::kSnapshotCorrupt), "missing"));
  world[0].reply(loaded.ask(load));
  CHECK(world.row(7) == loaded.saved_row(0, 7));
}

// Rows that were dropped and could not be loaded are not missed silently.
TEST(snapshot_half_loaded_cannot_be_used) {
  LoadedWorld loaded(snapshot_layout(2, 64, 4));
  World& world = *loaded.world;
  wire::Load drop;
  drop.table = 1;
  drop.kind = wire::LoadKind::kReplace;
  world[0].reply(loaded.ask(drop));
  const wire::Load load = loaded.load(1);
  const std::string path = "/snaps/snap-1/" + load.file;
  loaded.files->flip(path, 400);
  wire::Load bad = load;
  bad.checksums[0] ^= 1;
  world[0].error(loaded.ask(bad), ErrorCode::kSnapshotCorrupt);
  PushSpec spec;
  spec.configs = world.layout.configs;
  spec.tables[1] = {{3, 1.0f}};
  const std::string text = world[0].error(world.push(0, spec), ErrorCode::kSnapshot);
  CHECK(contains(text, "table t1: its rows were dropped"));
  CHECK(contains(text, "Load a whole snapshot"));
  // From the first on, and it can be used.
  loaded.files->flip(path, 400);
  wire::Load whole = load;
  whole.kind = wire::LoadKind::kReplace;
  world[0].reply(loaded.ask(whole));
  CHECK(world.row(3, 1) == loaded.saved_row(1, 3));
}

TEST(snapshot_load_is_refused_where_it_does_not_fit) {
  LoadedWorld loaded(snapshot_layout(2, 64, 4));
  World& world = *loaded.world;
  const wire::Load good = loaded.load(0);
  // Of another server.
  wire::ParamSetLayout layout = world.layout;
  server::ServerOptions options = loaded.options;
  options.server_count = 2;
  options.shard_id = 1;
  World other(layout, options, false);
  other[0].reply(other[0].ask(wire::FrameKind::kReady));
  CHECK(contains(other[0].error(other[0].ask(wire::FrameKind::kLoad, encode(good)),
                                ErrorCode::kInvalidArgument),
                 "belongs to server 0"));
  // Averages, of which none are kept.
  wire::Load averages = good;
  averages.offsets[5] = averages.offsets[1];
  CHECK(contains(world[0].error(loaded.ask(averages), ErrorCode::kInvalidArgument), "averages"));
  // Where no directory is known.
  world.server.set_snapshot_directory("");
  CHECK(contains(world[0].error(loaded.ask(good), ErrorCode::kSnapshot), "CPUDIST_SNAPSHOT_DIR"));
  world.server.set_snapshot_directory("/snaps");
  world[0].reply(loaded.ask(good));
}

TEST(snapshot_load_keeps_no_other_request_waiting) {
  LoadedWorld loaded(snapshot_layout(2, 64, 4));
  Trainer& trainer = (*loaded.world)[0];
  Gate gate(*loaded.files);
  const uint64_t load = trainer.begin(wire::FrameKind::kLoad, encode(loaded.load(1)));
  gate.wait_reached();
  const uint64_t beat = trainer.plain(wire::FrameKind::kHeartbeat, wire::kNoParamSet, Buffer());
  trainer.reply(beat, wire::FrameKind::kHeartbeatAck);
  CHECK(trainer.waits(load));
  gate.open();
  CHECK(trainer.comes(load));
  trainer.reply(load);
}

// What cannot be decoded ends the link, as everywhere.
TEST(snapshot_load_that_is_malformed_closes_the_link) {
  LoadedWorld loaded(snapshot_layout(2, 64, 4));
  Trainer& trainer = (*loaded.world)[0];
  trainer.begin(wire::FrameKind::kLoad, Buffer(3));
  CHECK(trainer.closes());
}

TEST(snapshot_load_is_refused_while_pushes_wait) {
  wire::ParamSetLayout layout = snapshot_layout(2, 64, 4);
  LoadedWorld loaded(layout);
  loaded.options.trainer_count = 2;
  World world(layout, loaded.options);
  PushSpec spec;
  spec.configs = layout.configs;
  spec.tables[1] = {{3, 1.0f}};
  const uint64_t waiting = world.push(1, spec);
  CHECK(world[1].waits(waiting));
  const auto load = [&](size_t rank) {
    return world[rank].ask(wire::FrameKind::kLoad, encode(loaded.load(1)));
  };
  CHECK(contains(world[0].error(load(0), ErrorCode::kInvalidArgument),
                 "while pushes of trainers wait"));
  world[0].reply(world.push(0, spec));
  CHECK(!world[1].waits(waiting));
  world[0].reply(load(0));
  // Only trainer 0 loads.
  CHECK(contains(world[1].error(load(1), ErrorCode::kInvalidArgument), "only trainer 0"));
}

}  // namespace cpudist::testing
