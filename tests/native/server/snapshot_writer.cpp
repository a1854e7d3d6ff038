// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: what one class promises
//
// What the writer of snapshots writes: what was there at the cut, whatever changes meanwhile, or
// nothing that anybody is told of.

#include <thread>

#include "support/failing_new.h"
#include "support/patience.h"
#include "support/run_all.h"
#include "support/snapshot_fixture.h"

namespace cpudist::testing {
namespace {

std::string name_of(uint64_t number) { return "snap-" + std::to_string(number); }

}  // namespace

TEST(snapshot_has_what_was_there_at_the_cut) {
  for (const double decay : {0.0, 0.9}) {
    const auto files = std::make_shared<MemoryFiles>();
    server::SnapshotWriter writer(writer_options(files));
    Rig rig(snapshot_layout(3, 200, 5, decay));
    rig.store_values();
    std::mt19937 random(3);
    for (int i = 0; i < 20; ++i) rig.push_some(random, 10);
    Gate gate(*files);
    const Rig::Cut cut = rig.begin(writer, 7, "snap-7");
    gate.wait_reached();
    CHECK_EQ(writer.status(0, 7, "").state, wire::CutState::kWriting);
    // Every row changes, and rows of remote tables come into being.
    std::vector<std::vector<int64_t>> all;
    for (uint32_t table = 0; table < 3; ++table) all.push_back(rig.own_keys(table));
    rig.push(all);
    rig.push(all);
    CHECK(writer.image_bytes() > 0);
    gate.open();
    const wire::CutStatus status = status_at_end(writer, 7);
    CHECK_EQ(status.reason, "");
    CHECK_EQ(status.state, wire::CutState::kDone);
    check_snapshot(rig, cut, status, files->contents(), "/snaps/snap-7");
    CHECK_EQ(status.version.round, 20u);
    CHECK_EQ(status.version.samples, 20u);
    CHECK_EQ(status.table_steps.size(), 3u);
    CHECK_EQ(status.table_steps[0], 20u);
    CHECK_EQ(status.block_steps[0], 20u);
    CHECK_EQ(status.members.size(), 1u);
    CHECK_EQ(writer.image_bytes(), 0u);
    // All of it lies on the disk.
    const auto disk = files->after_crash([](size_t) { return size_t{0}; });
    check_snapshot(rig, cut, status, disk, "/snaps/snap-7");
  }
}

TEST(snapshot_of_many_slabs_is_in_parts) {
  if (kOfThreads) return;  // 80 MB of rows
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  wire::ParamSetLayout layout = snapshot_layout(1, 1200, 8192);  // 64 KiB a row, 63 in a slab
  Rig rig(layout);
  rig.store_values();
  const Rig::Cut cut = rig.begin(writer, 1, "snap-1");
  std::mt19937 random(4);
  for (int i = 0; i < 20; ++i) rig.push_some(random, 20);
  const wire::CutStatus status = status_at_end(writer, 1);
  CHECK_EQ(status.reason, "");
  CHECK(status.files.size() >= 4);
  CHECK_EQ(status.files[0].name, "s000-t000-0000.safetensors");
  CHECK_EQ(status.files[1].name, "s000-t000-0001.safetensors");
  CHECK_EQ(status.files.back().name, "s000-dense.safetensors");
  CHECK(status.files[0].bytes <= (33u << 20));
  check_snapshot(rig, cut, status, files->contents(), "/snaps/snap-1");
}

// Each row's weight, state and count are of one update, and of the cut, while several threads
// update, pull and save.
TEST(snapshot_under_load_is_of_one_moment) {
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  Rig rig(snapshot_layout(4, 3000, 6, 0.75), 0, 1, 3);
  rig.store_values();
  const int rounds = kOfThreads ? 4 : kInstrumented ? 15 : 20;
  std::atomic<bool> stop{false};
  const auto train = [&](uint32_t seed) {
    std::mt19937 random(seed);
    while (!stop) {
      writer.wait_for_room();
      rig.push_some(random, 200);
    }
  };
  const auto read = [&] {
    std::vector<float> out(64 * 6);
    std::vector<int64_t> keys(64);
    std::mt19937 random(1);
    while (!stop) {
      for (auto& key : keys) key = static_cast<int64_t>(random() % 3000);
      const std::shared_lock lock(rig.mutex);
      rig.store.tables[0]->gather(keys, out.data());
      rig.store.tables[1]->gather_averages(keys, rig.version.round, out.data());
    }
  };
  const auto save = [&] {
    try {
      for (int round = 1; round <= rounds; ++round) {
        const auto number = static_cast<uint64_t>(round);
        const Rig::Cut cut = rig.begin(writer, number, name_of(number));
        const wire::CutStatus status = status_at_end(writer, number);
        CHECK_EQ(status.reason, "");
        check_snapshot(rig, cut, status, files->contents(), "/snaps/" + name_of(number));
        writer.abandon(0, number);
      }
    } catch (...) {
      stop = true;
      throw;
    }
    stop = true;
  };
  run_all({[&] { train(1); }, [&] { train(2); }, read, save});
  CHECK_EQ(writer.image_bytes(), 0u);
}

// Wherever the machine stops: what was told to be written is on the disk, to the byte.
TEST(snapshot_crash_at_every_call_leaves_all_files_or_no_word_of_them) {
  const auto prepare = [](Rig& rig) {
    rig.store_values();
    std::mt19937 random(9);
    for (int i = 0; i < 3; ++i) rig.push_some(random, 10);
  };
  Rig rig(snapshot_layout(52, 16, 3));
  prepare(rig);
  const int64_t step = kOfThreads ? 5 : 1;
  int64_t points = 0;
  int64_t done = 0;
  for (int64_t at = 0;; at += step) {
    const auto files = std::make_shared<MemoryFiles>();
    files->put("/keep/me", {1, 2, 3});
    server::SnapshotWriter writer(writer_options(files));
    files->fail_at(at, EIO, true);
    const Rig::Cut cut = rig.begin(writer, 1, "snap-1");
    const wire::CutStatus status = status_at_end(writer, 1);
    const bool crashed = files->calls() > at;
    if (!crashed) ++done;
    CHECK_EQ(status.state, crashed ? wire::CutState::kFailed : wire::CutState::kDone);
    CHECK_EQ(status.files.empty(), crashed);
    std::mt19937 random(static_cast<uint32_t>(at));
    for (int i = 0; i < 3; ++i) {
      // Of what was not synced nothing, anything, or everything is there.
      const auto disk = files->after_crash([&](size_t most) {
        return i == 0 ? size_t{0} : i == 1 ? most : size_t{random() % (most + 1)};
      });
      CHECK(disk.at("/keep/me") == (Bytes{1, 2, 3}));
      if (!crashed) check_snapshot(rig, cut, status, disk, "/snaps/snap-1");
    }
    CHECK_EQ(writer.image_bytes(), 0u);
    if (!crashed) break;
    ++points;
    // The failure is named, and the next one goes well.
    CHECK(contains(status.reason, "snapshot snap-1, server 0 (host-s pid 1): "));
    CHECK(contains(status.reason, " /"));  // which file or directory
    CHECK(contains(status.reason, "Input/output error"));
  }
  CHECK_EQ(done, 1);
  CHECK(points >= 200 / step);
}

TEST(snapshot_full_disk_is_told_and_the_next_one_goes_well) {
  Rig rig(snapshot_layout(2, 60, 3));
  rig.store_values();
  for (const int error : {ENOSPC, EROFS, EACCES, EDQUOT}) {
    bool happened = true;
    for (int64_t at = 0; happened; at += 3) {
      const auto files = std::make_shared<MemoryFiles>();
      server::SnapshotWriter writer(writer_options(files));
      files->fail_at(at, error, false);
      const Rig::Cut cut = rig.begin(writer, 1, "snap-1");
      const wire::CutStatus status = status_at_end(writer, 1);
      happened = status.state == wire::CutState::kFailed;
      if (!happened) {
        check_snapshot(rig, cut, status, files->contents(), "/snaps/snap-1");
        continue;
      }
      CHECK(contains(status.reason, std::strerror(error)));
      CHECK(contains(status.reason, " /"));
      for (const auto& [path, bytes] : files->contents()) {
        fail(__FILE__, __LINE__, path + " was left of " + std::to_string(bytes.size()) + " bytes");
      }
      std::mt19937 random(1);
      rig.push_some(random, 5);
      const Rig::Cut next = rig.begin(writer, 2, "snap-2");
      const wire::CutStatus after = status_at_end(writer, 2);
      CHECK_EQ(after.reason, "");
      check_snapshot(rig, next, after, files->contents(), "/snaps/snap-2");
    }
  }
}

TEST(snapshot_without_a_directory_is_refused) {
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotOptions options = writer_options(files);
  options.directory = "";
  server::SnapshotWriter writer(options);
  Rig rig(snapshot_layout(1, 10, 2));
  rig.store_values();
  try {
    rig.begin(writer, 1, "snap-1");
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kSnapshot);
    CHECK(contains(error.what(), "server 0 (host-s pid 1)"));
    CHECK(contains(error.what(), "CPUDIST_SNAPSHOT_DIR"));
  }
  CHECK_EQ(writer.status(0, 1, "").state, wire::CutState::kUnknown);
  CHECK_EQ(writer.status(0, 0, "token").state, wire::CutState::kFailed);
  CHECK(contains(writer.status(0, 0, "token").reason, "no snapshot directory"));
  writer.set_directory("/other/place/");
  CHECK(contains(writer.status(0, 0, "token").reason, "does not find token in /other/place"));
  files->put("/other/place/token", {1});
  CHECK_EQ(writer.status(0, 0, "token").state, wire::CutState::kDone);
  CHECK_EQ(writer.status(0, 0, "../x").state, wire::CutState::kFailed);
  rig.begin(writer, 1, "snap-1");
  CHECK_EQ(status_at_end(writer, 1).reason, "");
  CHECK(files->has_directory("/other/place/snap-1"));
}

TEST(snapshot_begins_one_at_a_time_and_never_over_another) {
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  Rig rig(snapshot_layout(1, 10, 2));
  rig.store_values();
  for (const char* name : {"", "..", "a/b", "A", "-a", "a..b"}) {
    CHECK_THROWS(rig.begin(writer, 1, name), Error);
  }
  {
    Gate gate(*files);
    rig.begin(writer, 1, "first");
    gate.wait_reached();
    try {
      rig.begin(writer, 2, "second");
      CHECK(false);
    } catch (const Error& error) {
      CHECK_EQ(std::string(error.what()), "snapshot first is still being written");
    }
    gate.open();
    CHECK_EQ(status_at_end(writer, 1).reason, "");
  }
  files->watch(nullptr);
  files->put("/snaps/first/manifest.json", {1});
  const auto before = files->contents();
  rig.begin(writer, 3, "first");
  const wire::CutStatus status = status_at_end(writer, 3);
  CHECK(contains(status.reason, "is there already"));
  CHECK(files->contents() == before);
}

TEST(snapshot_given_up_leaves_no_files) {
  const auto files = std::make_shared<MemoryFiles>();
  Gate gate(*files);  // longer than the thread of the writer, which still removes files
  server::SnapshotWriter writer(writer_options(files));
  Rig rig(snapshot_layout(2, 50, 2));
  rig.store_values();
  const auto wait_empty = [&] {
    const TimePoint deadline = Clock::now() + kPatience;
    while (files->has_directory("/snaps/snap-1") || !files->contents().empty()) {
      CHECK(Clock::now() < deadline);
      let_pass(std::chrono::milliseconds(1));
    }
  };
  // While it is written, and when it is done.
  rig.begin(writer, 1, "snap-1");
  gate.wait_reached();
  writer.abandon(0, 1);
  CHECK_EQ(writer.status(0, 1, "").state, wire::CutState::kUnknown);
  gate.open();
  wait_empty();
  const TimePoint deadline = Clock::now() + kPatience;
  while (true) {  // the one that was given up may still end
    try {
      rig.begin(writer, 2, "snap-1");
      break;
    } catch (const Error&) {
      CHECK(Clock::now() < deadline);
      let_pass(std::chrono::milliseconds(1));
    }
  }
  CHECK_EQ(status_at_end(writer, 2).state, wire::CutState::kDone);
  CHECK(!files->contents().empty());
  writer.abandon(0, 2);
  wait_empty();
  writer.abandon(0, 2);
  writer.abandon(5, 77);
  // What a manifest names stays.
  rig.begin(writer, 3, "snap-3");
  CHECK_EQ(status_at_end(writer, 3).state, wire::CutState::kDone);
  files->put("/snaps/snap-3/manifest.json", {1});
  const auto before = files->contents();
  writer.abandon(0, 3);
  rig.begin(writer, 4, "snap-4");
  CHECK_EQ(status_at_end(writer, 4).state, wire::CutState::kDone);
  for (const auto& [path, bytes] : before) CHECK(files->contents().at(path) == bytes);
}

TEST(snapshot_of_a_set_that_goes_is_given_up) {
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotWriter writer(writer_options(files));
  Gate gate(*files);
  {
    Rig rig(snapshot_layout(2, 50, 2));
    rig.store_values();
    rig.begin(writer, 1, "snap-1");
    gate.wait_reached();
    writer.forget(5);
    writer.forget(0);
  }
  gate.open();
  CHECK(contains(status_at_end(writer, 1).reason, "closed before its rows were written"));
  CHECK(files->contents().empty());
}

TEST(snapshot_whose_images_need_too_much_fails_alone) {
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotOptions options = writer_options(files);
  options.memory_bytes = 64 << 10;
  server::SnapshotWriter writer(options);
  Rig rig(snapshot_layout(1, 4000, 8));
  rig.store_values();
  std::vector<std::vector<int64_t>> all = {rig.own_keys(0)};
  {
    Gate gate(*files);
    rig.begin(writer, 1, "snap-1");
    gate.wait_reached();
    rig.push(all);
    CHECK(writer.image_bytes() <= options.memory_bytes);
    writer.wait_for_room();  // it has failed: nobody waits for it
    gate.open();
    const std::string reason = status_at_end(writer, 1).reason;
    CHECK(contains(reason, "65536"));
    CHECK(contains(reason, "CPUDIST_SERVER_SNAPSHOT_MEMORY_BYTES"));
  }
  files->watch(nullptr);
  CHECK_EQ(writer.image_bytes(), 0u);
  CHECK_EQ(rig.store.tables[0]->header(0).count, 1u);
  const Rig::Cut cut = rig.begin(writer, 2, "snap-2");
  const wire::CutStatus status = status_at_end(writer, 2);
  check_snapshot(rig, cut, status, files->contents(), "/snaps/snap-2");
  CHECK_EQ(writer.waits(), 0u);
}

TEST(snapshot_makes_pushes_wait_where_little_room_is_left) {
  const auto room = std::make_shared<table::ImageRoom>(1000);
  table::ImageMemory memory(room);
  CHECK(memory.take(700));
  room->wait_for_room(Clock::now() + kPatience);
  CHECK_EQ(room->waits(), 0u);
  CHECK(memory.take(200));
  room->wait_for_room(Clock::now() + std::chrono::milliseconds(1));  // as long as that, no longer
  CHECK_EQ(room->waits(), 1u);
  run_all({[&] { room->wait_for_room(Clock::now() + kPatience); },
           [&] {
             while (room->waits() < 2) let_pass(std::chrono::milliseconds(1));
             memory.give_back(900);
           }});
  CHECK_EQ(memory.failure(), table::ImageMemory::Failure::kNone);
  CHECK(!memory.take(1001));
  CHECK_EQ(memory.failure(), table::ImageMemory::Failure::kLimit);
  CHECK_EQ(room->used_bytes(), 0u);
}

// Each block is copied when it is about to change, or when it is its turn.
TEST(snapshot_of_large_dense_parameters_has_what_was_there_at_the_cut) {
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotOptions options = writer_options(files);
  options.dense_at_once = 0;
  server::SnapshotWriter writer(options);
  Rig rig(snapshot_layout(1, 50, 3, 0.5));
  rig.store_values();
  std::mt19937 random(2);
  for (int i = 0; i < 3; ++i) rig.push_some(random, 5);
  Gate gate(*files);
  const Rig::Cut cut = rig.begin(writer, 1, "snap-1");
  gate.wait_reached();
  {
    const std::unique_lock lock(rig.mutex);  // one of two
    const std::vector<double> gradient(rig.layout.blocks[0].elements, 0.5);
    rig.store.blocks[0]->update(rig.layout.configs[0], gradient.data(), rig.version.round);
    rig.store.blocks[0]->renumber(rig.version.round + 1, 0);
  }
  gate.open();
  const wire::CutStatus status = status_at_end(writer, 1);
  CHECK_EQ(status.reason, "");
  check_snapshot(rig, cut, status, files->contents(), "/snaps/snap-1");
}

TEST(snapshot_gives_its_memory_up_to_others) {
  const auto files = std::make_shared<MemoryFiles>();
  server::SnapshotOptions options = writer_options(files);
  options.cap = std::make_shared<MemoryCap>(uint64_t{64} << 20);
  server::SnapshotWriter writer(options);
  Rig rig(snapshot_layout(1, 4000, 8));
  rig.store_values();
  {
    Gate gate(*files);
    rig.begin(writer, 1, "snap-1");
    gate.wait_reached();
    const uint64_t before = options.cap->lent_bytes();
    CHECK(before > 4000 * (16 + 2 * 8 * 4));
    rig.push({rig.own_keys(0)});
    CHECK_EQ(options.cap->lent_bytes(), before + writer.image_bytes());
    writer.give_up_for_memory();
    gate.open();
    const wire::CutStatus status = status_at_end(writer, 1);
    CHECK_EQ(status.state, wire::CutState::kFailed);
    CHECK(contains(status.reason, "memory_cap_bytes = 67108864"));
  }
  files->watch(nullptr);
  CHECK_EQ(options.cap->lent_bytes(), 0u);
  CHECK(files->contents().empty());
  // What has no room is refused before anything is copied, and the next one has.
  const uint64_t rest = (uint64_t{64} << 20) - 1000;
  CHECK(options.cap->lend(rest));
  try {
    rig.begin(writer, 2, "snap-2");
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kFull);
    CHECK(contains(error.what(), "memory_cap_bytes = 67108864"));
    CHECK(contains(error.what(), "CPUDIST_SERVER_MEMORY_CAP_BYTES"));
  }
  CHECK_EQ(options.cap->lent_bytes(), rest);
  options.cap->give_back(rest);
  const Rig::Cut cut = rig.begin(writer, 3, "snap-3");
  const wire::CutStatus status = status_at_end(writer, 3);
  check_snapshot(rig, cut, status, files->contents(), "/snaps/snap-3");
}

TEST(snapshot_without_memory_changes_nothing) {
  Rig rig(snapshot_layout(3, 100, 4, 0.5));
  rig.store_values();
  int64_t refused = 0;
  at_every_allocation([&](int64_t nth) {
    const auto files = std::make_shared<MemoryFiles>();
    server::SnapshotWriter writer(writer_options(files));
    const std::unique_lock lock(rig.mutex);
    bool happened = false;
    bool thrown = false;
    {
      server::SnapshotJob job{0, 1, "snap-1", {0}};
      const FailingNew failing(nth);
      try {
        writer.begin(std::move(job), rig.source(), rig.mutex);
      } catch (const Error& error) {
        CHECK_EQ(error.code(), ErrorCode::kOutOfMemory);
        thrown = true;
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
      happened = failing.happened();
    }
    refused += thrown;
    if (thrown) {
      CHECK_EQ(writer.status(0, 1, "").state, wire::CutState::kUnknown);
      CHECK_EQ(writer.image_bytes(), 0u);
    }
    return happened;
  });
  CHECK(refused > 5);
}

}  // namespace cpudist::testing
