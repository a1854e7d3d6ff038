// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Snapshots of what has changed: with their base they are what was there at the cut, whatever
// changes rows; where a server does not know what has changed, it says so.

#include <cmath>
#include <thread>

#include "support/run_all.h"
#include "support/snapshot_fixture.h"

namespace cpudist::testing {
namespace {

std::string delta_name(uint64_t number) { return "snap-" + std::to_string(number); }

Rig::Cut begin_delta(Rig& rig, server::SnapshotWriter& writer, uint64_t number, uint64_t base) {
  const std::unique_lock lock(rig.mutex);
  Rig::Cut cut{rig.all_rows(), rig.dense()};
  writer.begin({0, number, delta_name(number), {0}, base}, rig.source(), rig.mutex);
  return cut;
}

using TablesByKey = std::vector<RowsByKey>;

// The rows of the files that a status names.
TablesByKey rows_in_files(const Rig& rig, const wire::CutStatus& status, MemoryFiles& files,
                          uint64_t number) {
  CHECK_EQ(status.reason, "");
  const auto contents = files.contents();
  TablesByKey found(rig.layout.tables.size());
  for (const wire::CutFile& told : status.files) {
    const Bytes& file = contents.at("/snaps/" + delta_name(number) + "/" + told.name);
    check_sums(told, file);
    if (told.table == wire::kDenseFile) continue;
    CHECK(told.rows > 0);
    found[told.table].merge(rows_of(file, rig.layout.tables[told.table].name, told.rows));
  }
  return found;
}

void put_over(TablesByKey& base, const TablesByKey& changed) {
  for (size_t table = 0; table < base.size(); ++table) {
    for (const auto& [key, bytes] : changed[table]) base[table][key] = bytes;
  }
}

size_t rows_in(const TablesByKey& tables) {
  size_t count = 0;
  for (const RowsByKey& rows : tables) count += rows.size();
  return count;
}

std::string delta_refusal(Rig& rig, server::SnapshotWriter& writer, uint64_t number,
                          uint64_t base) {
  try {
    begin_delta(rig, writer, number, base);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kSnapshot);
    CHECK(contains(error.what(), delta_name(number)));
    CHECK(contains(error.what(), "server 0 (host-s pid 1)"));
    CHECK(contains(error.what(), "Save a full one"));
    CHECK_EQ(writer.status(0, number, "").state, wire::CutState::kUnknown);
    return error.what();
  }
  return "";
}

// Two trainers' pushes merged, with or without a norm that clips, as rounds apply them.
void push_merged(Rig& rig, std::mt19937& random, bool clipped) {
  server::Pushes pushes;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    PushSpec spec;
    spec.configs = rig.layout.configs;
    pushes.emplace(rank, drawn_push(rig, std::move(spec), random, 4));
  }
  const std::unique_lock lock(rig.mutex);
  rig.update.prepare(pushes);
  if (clipped) {
    std::vector<double> norms(1);
    rig.update.merge(pushes, norms);
    norms[0] = std::sqrt(norms[0]);
    rig.update.apply_merged(pushes, norms, rig.version.round);
  } else {
    rig.update.apply(pushes, rig.version.round);
  }
  ++rig.version.round;
}

kernels::OptimizerConfig rule_config(kernels::OptimizerKind kind) {
  using Kind = kernels::OptimizerKind;
  kernels::OptimizerConfig config;
  config.kind = kind;
  config.lr = 0.125;
  if (kind == Kind::kSgd) config.momentum = 0.5;
  if (kind == Kind::kAdam || kind == Kind::kSparseAdam || kind == Kind::kAdamW) {
    config.beta1 = 0.9;
    config.beta2 = 0.99;
  }
  if (kind == Kind::kRmsprop) config.alpha = 0.9;
  if (kind == Kind::kFtrl) config.lr_power = -0.5;
  if (kind != Kind::kSgd) config.eps = 1e-8;
  return config;
}

}  // namespace

// A row that changes and does not say when would be missing here.
TEST(snapshot_base_and_changes_are_what_was_there_under_every_rule) {
  for (uint32_t kind = 0; kind < kernels::kOptimizerKindCount; ++kind) {
    for (const double decay : {0.0, 0.9}) {
      wire::ParamSetLayout layout = snapshot_layout(3, 60, 4, decay);
      layout.configs[0] = rule_config(static_cast<kernels::OptimizerKind>(kind));
      const auto files = std::make_shared<MemoryFiles>();
      server::SnapshotWriter writer(writer_options(files));
      Rig rig(layout);
      rig.store_values();
      std::mt19937 random(kind + 1);
      for (int i = 0; i < 5; ++i) rig.push_some(random, 5);
      rig.begin(writer, 1, delta_name(1));
      TablesByKey chain = rows_in_files(rig, status_at_end(writer, 1), *files, 1);
      for (uint64_t number = 2; number < 8; ++number) {
        const uint64_t since = writer.status(0, number - 1, "").version.round;
        for (uint64_t i = 0; i < number % 4; ++i) {
          rig.push_some(random, 1 + number % 3);
          push_merged(rig, random, i % 2 == 0);
        }
        const Rig::Cut cut = begin_delta(rig, writer, number, number - 1);
        rig.push_some(random, 9);  // after the cut
        const wire::CutStatus status = status_at_end(writer, number);
        CHECK_EQ(status.base, number - 1);
        CHECK(status.can_be_base);
        const TablesByKey changed = rows_in_files(rig, status, *files, number);
        for (const RowsByKey& rows : changed) {
          for (const auto& [key, bytes] : rows) {
            uint32_t last_seen = 0;
            std::memcpy(&last_seen, bytes.data() + sizeof(uint32_t), sizeof last_seen);
            CHECK(last_seen >= since);
          }
        }
        // What the pushes after the cut before have changed is in it all the same.
        CHECK(number == 2 || rows_in(changed) > 0);
        put_over(chain, changed);
        CHECK(chain == cut.rows);
      }
    }
  }
}

TEST(snapshot_of_changes_while_rows_change) {
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  Rig rig(snapshot_layout(4, 3000, 6, 0.75), 0, 1, 3);
  rig.store_values();
  rig.begin(writer, 1, delta_name(1));
  TablesByKey chain = rows_in_files(rig, status_at_end(writer, 1), *files, 1);
  const uint64_t last = kOfThreads ? 6 : kInstrumented ? 10 : 40;
  std::atomic<bool> stop{false};
  const auto train = [&](uint32_t seed) {
    std::mt19937 random(seed);
    while (!stop) {
      writer.wait_for_room();
      rig.push_some(random, 50);
    }
  };
  const auto save = [&] {
    try {
      for (uint64_t number = 2; number < last; ++number) {
        const Rig::Cut cut = begin_delta(rig, writer, number, number - 1);
        put_over(chain, rows_in_files(rig, status_at_end(writer, number), *files, number));
        CHECK(chain == cut.rows);
      }
    } catch (...) {
      stop = true;
      throw;
    }
    stop = true;
  };
  run_all({[&] { train(1); }, [&] { train(2); }, save});
  CHECK_EQ(writer.image_bytes(), 0u);
}

TEST(snapshot_of_changes_counts_updates_beyond_32_bits) {
  for (const uint64_t start : {uint64_t{0xfffffffd}, (uint64_t{7} << 32) - 2}) {
    const auto files = std::make_shared<MemoryFiles>();
    server::SnapshotWriter writer(writer_options(files));
    Rig rig(snapshot_layout(2, 50, 3));
    rig.version.round = start;
    rig.store_values();
    std::mt19937 random(2);
    rig.push_some(random, 20);
    rig.begin(writer, 1, delta_name(1));
    TablesByKey chain = rows_in_files(rig, status_at_end(writer, 1), *files, 1);
    for (int i = 0; i < 4; ++i) rig.push_some(random, 3);
    const Rig::Cut cut = begin_delta(rig, writer, 2, 1);
    put_over(chain, rows_in_files(rig, status_at_end(writer, 2), *files, 2));
    CHECK(chain == cut.rows);
    // Rows could not say any more whether they have changed.
    rig.version.round += (uint64_t{1} << 31) - 4;
    CHECK(delta_refusal(rig, writer, 3, 1) != "");
    CHECK_EQ(delta_refusal(rig, writer, 3, 2), "");
    CHECK_EQ(status_at_end(writer, 3).reason, "");
  }
}

TEST(snapshot_of_few_changes_in_many_slabs_is_one_part) {
  if (kOfThreads) return;  // 80 MB of rows
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  Rig rig(snapshot_layout(1, 1200, 8192));  // 64 KiB a row, 63 in a slab
  rig.store_values();
  rig.begin(writer, 1, delta_name(1));
  TablesByKey chain = rows_in_files(rig, status_at_end(writer, 1), *files, 1);
  std::mt19937 random(4);
  rig.push_some(random, 100);
  Rig::Cut cut = begin_delta(rig, writer, 2, 1);
  wire::CutStatus status = status_at_end(writer, 2);
  CHECK_EQ(status.files.size(), 2u);  // and the dense blocks
  put_over(chain, rows_in_files(rig, status, *files, 2));
  CHECK(chain == cut.rows);
  // Nothing: no part.
  cut = begin_delta(rig, writer, 3, 2);
  status = status_at_end(writer, 3);
  CHECK_EQ(status.files.size(), 1u);
  CHECK_EQ(status.files[0].name, "s000-dense.safetensors");
  // All: as many as a full one has.
  rig.push({rig.own_keys(0)});
  cut = begin_delta(rig, writer, 4, 3);
  status = status_at_end(writer, 4);
  CHECK(rows_in_files(rig, status, *files, 4) == cut.rows);
  CHECK_EQ(status.files.size(), writer.status(0, 1, "").files.size());
  for (const wire::CutFile& file : status.files) CHECK(file.bytes <= (33u << 20));
}

TEST(snapshot_of_changes_needs_a_base_that_the_server_knows) {
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  Rig rig(snapshot_layout(2, 30, 2));
  rig.store_values();
  CHECK(contains(delta_refusal(rig, writer, 5, 4), "since cut 4"));  // never heard of it
  files->fail_at(2, EIO, false);
  rig.begin(writer, 1, delta_name(1));
  CHECK_EQ(status_at_end(writer, 1).state, wire::CutState::kFailed);
  CHECK(!writer.status(0, 1, "").can_be_base);
  CHECK(delta_refusal(rig, writer, 5, 1) != "");  // not written
  rig.begin(writer, 2, delta_name(2));
  CHECK(status_at_end(writer, 2).can_be_base);
  writer.abandon(0, 2);
  CHECK(delta_refusal(rig, writer, 5, 2) != "");  // abandoned
  rig.begin(writer, 3, delta_name(3));
  status_at_end(writer, 3);
  writer.forget_bases(1);  // another set's
  CHECK(writer.status(0, 3, "").can_be_base);
  CHECK_THROWS(writer.begin({1, 5, "snap-5", {0}, 3}, rig.source(), rig.mutex), Error);
  writer.forget_bases(0);
  CHECK(!writer.status(0, 3, "").can_be_base);
  CHECK_EQ(writer.status(0, 3, "").state, wire::CutState::kDone);
  CHECK(delta_refusal(rig, writer, 5, 3) != "");  // values were stored
  // Those of another set do not push out this one's.
  rig.begin(writer, 6, delta_name(6));
  status_at_end(writer, 6);
  for (uint64_t number = 1; number < 20; ++number) {
    writer.begin({1, number, "other-" + std::to_string(number), {0}}, rig.source(), rig.mutex);
    while (writer.status(1, number, "").state == wire::CutState::kWriting) {
      let_pass(std::chrono::milliseconds(1));
    }
  }
  CHECK_EQ(writer.status(1, 1, "").state, wire::CutState::kUnknown);
  CHECK_EQ(delta_refusal(rig, writer, 7, 6), "");
  status_at_end(writer, 7);
  writer.forget(0);  // the set goes, and its number may come back
  CHECK(delta_refusal(rig, writer, 8, 7) != "");
}

TEST(snapshot_whose_values_are_stored_while_it_is_written_is_no_base) {
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  Rig rig(snapshot_layout(2, 30, 2));
  rig.store_values();
  rig.begin(writer, 1, delta_name(1));
  writer.forget_bases(0);
  const wire::CutStatus status = status_at_end(writer, 1);
  CHECK_EQ(status.state, wire::CutState::kDone);
  CHECK(!status.can_be_base);
  CHECK(delta_refusal(rig, writer, 2, 1) != "");
}

// Wherever the machine stops: what was told to be written is on the disk, and the base untouched.
TEST(snapshot_of_changes_crash_at_every_call) {
  Rig rig(snapshot_layout(26, 40, 3));
  rig.store_values();
  std::mt19937 random(9);
  const int64_t step = kOfThreads ? 5 : 1;
  int64_t points = 0;
  for (int64_t at = 0;; at += step) {
    const auto files = std::make_shared<MemoryFiles>();
    server::SnapshotWriter writer(writer_options(files));
    rig.begin(writer, 1, delta_name(1));
    const TablesByKey base = rows_in_files(rig, status_at_end(writer, 1), *files, 1);
    rig.push_some(random, 3);
    const int64_t before = files->calls();
    files->fail_at(before + at, EIO, true);
    const Rig::Cut cut = begin_delta(rig, writer, 2, 1);
    const wire::CutStatus status = status_at_end(writer, 2);
    const bool crashed = files->calls() > before + at;
    CHECK_EQ(status.state, crashed ? wire::CutState::kFailed : wire::CutState::kDone);
    CHECK_EQ(status.can_be_base, !crashed);
    const auto left = std::make_shared<MemoryFiles>();
    for (const auto& [path, bytes] : files->after_crash([](size_t) { return size_t{0}; })) {
      left->put(path, bytes);
    }
    CHECK(rows_in_files(rig, writer.status(0, 1, ""), *left, 1) == base);
    if (!crashed) {
      TablesByKey chain = base;
      put_over(chain, rows_in_files(rig, status, *left, 2));
      CHECK(chain == cut.rows);
      break;
    }
    ++points;
  }
  CHECK(points >= 100 / step);
}

}  // namespace cpudist::testing
