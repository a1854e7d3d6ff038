// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Snapshots of tables whose rows go: what is saved is what was there at the cut, whoever takes the
// records of rows while they are written, and changes name the keys that have gone since their
// base.

#include <thread>

#include "server/snapshot/gone_keys.h"
#include "support/run_all.h"
#include "support/snapshot_fixture.h"

namespace cpudist::testing {
namespace {

// Table "t1" evicts its rows; "t0" has all of its.
wire::ParamSetLayout churning_layout(const wire::Eviction& rule, uint64_t rows = 400,
                                     double average_decay = 0) {
  wire::ParamSetLayout layout = snapshot_layout(2, rows, 3, average_decay);
  layout.tables[1].eviction = rule;
  layout.tables[1].eviction.on = true;
  return layout;
}

std::string cut_name(uint64_t number) { return "snap-" + std::to_string(number); }

std::vector<RowsByKey> begin_churned(Rig& rig, server::SnapshotWriter& writer, uint64_t number,
                                     uint64_t base = 0) {
  const std::unique_lock lock(rig.mutex);
  std::vector<RowsByKey> rows = rig.all_rows();
  writer.begin({0, number, cut_name(number), {0}, base}, rig.source(), rig.mutex);
  return rows;
}

struct SavedRows {
  std::vector<RowsByKey> rows;
  std::vector<std::set<int64_t>> gone;
};

SavedRows saved_rows(const Rig& rig, const wire::CutStatus& status, const MemoryFiles& files,
                     uint64_t number) {
  CHECK_EQ(status.reason, "");
  CHECK(status.state == wire::CutState::kDone);
  const auto contents = files.contents();
  SavedRows saved{std::vector<RowsByKey>(rig.layout.tables.size()),
                  std::vector<std::set<int64_t>>(rig.layout.tables.size())};
  for (const wire::CutFile& told : status.files) {
    const Bytes& file = contents.at("/snaps/" + cut_name(number) + "/" + told.name);
    check_sums(told, file);
    if (told.table != wire::kDenseFile) {
      saved.rows[told.table].merge(rows_of(file, rig.layout.tables[told.table].name, told.rows));
      continue;
    }
    if (told.name != "s000-gone.safetensors") continue;
    uint64_t keys = 0;
    const std::string text(file.begin(), file.end());
    CHECK(contains(text, "\"torch_cpudist.gone\""));
    for (const auto& [name, tensor] : tensors_of(file)) {
      CHECK_EQ(name, "t001.keys");
      CHECK_EQ(tensor.dtype, "I64");
      std::vector<int64_t> found((tensor.end - tensor.begin) / 8);
      std::memcpy(found.data(), file.data() + tensor.begin, found.size() * 8);
      CHECK(!found.empty());
      CHECK(std::adjacent_find(found.begin(), found.end(), std::greater_equal<>()) == found.end());
      saved.gone[1] = {found.begin(), found.end()};
      keys += found.size();
    }
    CHECK_EQ(told.rows, keys);
  }
  return saved;
}

void lay_over(std::vector<RowsByKey>& base, const SavedRows& changes) {
  for (size_t table = 0; table < base.size(); ++table) {
    for (const int64_t key : changes.gone[table]) base[table].erase(key);
    for (const auto& [key, bytes] : changes.rows[table]) base[table][key] = bytes;
  }
}

}  // namespace

TEST(snapshots_have_no_row_that_had_gone_and_all_that_went_later) {
  for (const double decay : {0.0, 0.5}) {
    Rig rig(churning_layout({.unseen_steps = 4, .max_rows = 90}, 400, decay));
    rig.store_values();
    std::mt19937 random(3);
    const auto files = std::make_shared<MemoryFiles>();
    for (uint64_t number = 1; number <= 6; ++number) {
      for (int step = 0; step < 8; ++step) rig.push_some(random, 20);
      CHECK(rig.store.tables[1]->row_count() < rig.store.tables[1]->record_count());
      Gate gate(*files);
      server::SnapshotWriter writer(writer_options(files));
      const auto expected = begin_churned(rig, writer, number);
      gate.wait_reached();
      // Nothing is copied yet: rows go, and others take their records.
      for (int step = 0; step < 8; ++step) rig.push_some(random, 20);
      gate.open();
      const wire::CutStatus status = status_at_end(writer, number);
      CHECK(saved_rows(rig, status, *files, number).rows == expected);
      files->watch({});
    }
    CHECK(rig.store.tables[1]->evicted_count() > 100);
  }
}

// Rows of many slabs, while they are copied one after the other.
TEST(snapshots_are_of_one_moment_while_rows_come_and_go) {
  wire::ParamSetLayout layout = churning_layout({.max_rows = 2500}, 100'000);
  layout.tables[1].dim = 4096;  // some hundreds in a slab
  layout.tables.erase(layout.tables.begin());
  Rig rig(layout);
  rig.store_values();
  std::mt19937 random(7);
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  for (int step = 0; step < 3; ++step) rig.push_some(random, 1000);
  for (uint64_t number = 1; number <= (kOfThreads ? 1 : kInstrumented ? 2 : 4); ++number) {
    std::map<int64_t, Bytes> expected = begin_churned(rig, writer, number)[0];
    wire::CutStatus status;
    run_all({[&] {
               while (writer.status(0, number, "").state == wire::CutState::kWriting) {
                 rig.push_some(random, 50);
               }
             },
             [&] { status = status_at_end(writer, number); }});
    CHECK_EQ(status.reason, "");
    RowsByKey found;
    const auto contents = files->contents();
    for (const wire::CutFile& told : status.files) {
      if (told.table != 0) continue;
      const Bytes& file = contents.at("/snaps/" + cut_name(number) + "/" + told.name);
      found.merge(rows_of(file, layout.tables[0].name, told.rows));
    }
    CHECK(found == expected);
  }
  CHECK(rig.store.tables[0]->evicted_count() > 0);
}

TEST(changes_name_the_keys_that_have_gone_since_their_base) {
  for (uint32_t seed = 1; seed <= (kInstrumented ? 4u : 20u); ++seed) {
    Rig rig(churning_layout({.unseen_steps = 3, .max_rows = 80}, 200));
    rig.store_values();
    std::mt19937 random(seed);
    const auto files = std::make_shared<MemoryFiles>();
    server::SnapshotWriter writer(writer_options(files));
    std::vector<RowsByKey> chained;
    std::map<uint64_t, std::vector<RowsByKey>> at;
    size_t named = 0;
    for (uint64_t number = 1; number <= 6; ++number) {
      const auto steps = random() % 6;
      for (uint32_t step = 0; step < steps; ++step) rig.push_some(random, random() % 25);
      // Over the one before, or over an older one.
      const uint64_t base = number == 1 ? 0 : number - 1 - random() % 2 * (number > 2 ? 1 : 0);
      at[number] = begin_churned(rig, writer, number, base);
      // What goes while it is written belongs to the next one.
      rig.push_some(random, 25);
      const wire::CutStatus status = status_at_end(writer, number);
      CHECK(status.can_be_base);
      CHECK_EQ(status.base, base);
      const SavedRows saved = saved_rows(rig, status, *files, number);
      for (const auto& keys : saved.gone) named += keys.size();
      if (base == 0) {
        CHECK(saved.rows == at.at(number));
        continue;
      }
      std::vector<RowsByKey> whole = at.at(base);
      lay_over(whole, saved);
      CHECK(whole == at.at(number));
    }
    CHECK(named > 0);
  }
}

TEST(servers_that_know_no_more_what_has_gone_want_a_full_snapshot) {
  // The keys that one part has room for, then more than that.
  const auto memory = std::make_shared<MemoryCap>(0);
  server::GoneKeys keys(memory, 100 * sizeof(int64_t));
  const std::vector<table::Freed> some(60, table::Freed{5, 0});
  keys.add(some);  // before the first mark nobody wants them
  CHECK_EQ(keys.size_bytes(), 0u);
  const uint64_t first = keys.mark();
  keys.add(some);
  CHECK_EQ(keys.size_bytes(), 480u);
  CHECK_EQ(memory->kept_bytes(), 480u);
  const uint64_t second = keys.mark();
  CHECK(keys.knows(first) && keys.knows(second) && !keys.knows(second + 1) && !keys.knows(0));
  CHECK_EQ(keys.since(first).size(), 1u);
  CHECK_EQ(keys.since(first)[0]->size(), 60u);
  CHECK(keys.since(second).empty());
  keys.trim(second);
  CHECK(!keys.knows(first) && keys.knows(second));
  CHECK_EQ(keys.size_bytes(), 0u);
  keys.add(some);
  const std::vector<table::Freed> few(30, table::Freed{6, 0});
  keys.add(few);
  // What it has room for counts, which is no more than it may keep.
  CHECK_EQ(keys.size_bytes(), 800u);
  CHECK_EQ(memory->kept_bytes(), 800u);
  CHECK(keys.knows(second));
  keys.add(some);  // too many
  CHECK(!keys.knows(second));
  CHECK_EQ(memory->kept_bytes(), 0u);
  const uint64_t third = keys.mark();
  CHECK(third > second && keys.knows(third));
  keys.drop();
  CHECK(!keys.knows(third));

  Rig rig(churning_layout({.unseen_steps = 1}, 200));
  rig.store_values();
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  std::mt19937 random(1);
  rig.push_some(random, 20);
  begin_churned(rig, writer, 1);
  CHECK(status_at_end(writer, 1).can_be_base);
  rig.gone[1]->drop();
  CHECK(!status_at_end(writer, 1).can_be_base);
  std::string told;
  try {
    begin_churned(rig, writer, 2, 1);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kSnapshot);
    told = error.what();
  }
  CHECK(contains(told, "which keys have lost their rows since cut 1"));
  CHECK(contains(told, "67108864 bytes"));
  CHECK(contains(told, "the next snapshot that is due has all rows"));
  CHECK(!contains(told, "stored or loaded"));
  rig.push_some(random, 20);
  begin_churned(rig, writer, 3);
  CHECK(status_at_end(writer, 3).can_be_base);
  begin_churned(rig, writer, 4, 3);
  CHECK_EQ(status_at_end(writer, 4).reason, "");
  // What went before the oldest snapshot that is known is not kept.
  for (uint64_t number = 5; number < 30; ++number) {
    for (int step = 0; step < 3; ++step) rig.push_some(random, 20);
    begin_churned(rig, writer, number);
    CHECK_EQ(status_at_end(writer, number).reason, "");
    CHECK(rig.gone[1]->size_bytes() <= 9 * 3 * 20 * sizeof(int64_t));
  }
}

}  // namespace cpudist::testing
