// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Rows that go: which ones, what becomes of their records, and what a cut sees of both.

#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <set>

#include "support/server_fixture.h"
#include "table/eviction.h"
#include "table/row_index.h"
#include "table/table.h"

namespace cpudist::testing {
namespace {

wire::TableSpec evicting(const wire::Eviction& rule, uint64_t rows = 1u << 20) {
  wire::TableSpec spec;
  spec.name = "emb";
  spec.rows = rows;
  spec.dim = 2;
  spec.remote = true;
  spec.initial = {{kernels::InitialOp::kNormal, 0.0, 0.5}};
  spec.eviction = rule;
  spec.eviction.on = true;
  return spec;
}

// A table that is updated by hand.
struct Updated {
  table::Table table;
  uint64_t updates = 0;
  TimePoint now{};

  explicit Updated(const wire::Eviction& rule, uint32_t servers = 1)
      : table(0, evicting(rule), sgd(), 0, servers) {}

  uint32_t record_of(int64_t key) const {
    uint32_t record = 0;
    table.find({&key, 1}, &record, nullptr);
    return record;
  }
  bool has(int64_t key) const { return record_of(key) != table::RowIndex::kNone; }
  // An update of these, and the sweep at its end. Returns the keys that go.
  std::set<int64_t> update(const std::vector<int64_t>& keys, uint64_t records = 1024,
                           std::span<const uint32_t> used = {}) {
    touch(keys);
    return sweep(records, used);
  }
  void touch(const std::vector<int64_t>& keys) {
    for (const int64_t key : keys) {
      uint32_t record = record_of(key);
      if (record == table::RowIndex::kNone) {
        table.make_room({&key, 1});
        record = table.make(key);
        table.begin({&record, 1});
      }
      table.before_change(record, 0);
      table.header(record).count_update();
      table.header(record).last_seen = static_cast<uint32_t>(updates);
      table.weight(record)[0] += 1.0f;
    }
    ++updates;
  }
  std::set<int64_t> sweep(uint64_t records, std::span<const uint32_t> used = {},
                          uint64_t most = 1u << 20) {
    table::Sweep sweep;
    sweep.updates = updates;
    sweep.now = now;
    sweep.records = records;
    sweep.most = most;
    sweep.used = used;
    std::set<int64_t> gone;
    for (const table::Freed& row : table.sweep(sweep).freed) {
      CHECK(gone.insert(row.key).second);
      CHECK(!has(row.key));
      CHECK(!table.header(row.record).is_row());
    }
    return gone;
  }
  std::set<int64_t> keys() const {
    std::set<int64_t> found;
    for (uint32_t record = 0; record < table.record_count(); ++record) {
      if (table.header(record).is_row()) found.insert(table.header(record).key);
    }
    return found;
  }
};

// The records of a frozen table, as a snapshot copies them.
std::map<int64_t, float> copied_rows(table::Table& table) {
  const table::RecordShape shape = table.shape();
  std::vector<uint8_t> slab(table.rows_per_slab() * shape.stride);
  std::map<int64_t, float> found;
  while (const uint32_t count = table.copy_frozen(slab.data())) {
    for (uint32_t i = 0; i < count; ++i) {
      table::RowHeader header;
      float value = 0;
      std::memcpy(&header, slab.data() + i * shape.stride, sizeof header);
      std::memcpy(&value, slab.data() + i * shape.stride + sizeof header, sizeof value);
      if (header.is_row()) CHECK(found.emplace(header.key, value).second);
    }
  }
  return found;
}

std::map<int64_t, float> rows_now(const Updated& one) {
  std::map<int64_t, float> found;
  for (const int64_t key : one.keys()) found[key] = one.table.weight(one.record_of(key))[0];
  return found;
}

}  // namespace

TEST(row_index_forgets_what_is_erased) {
  // Many tags share a line, some records a whole hash: erasing one must not hide those behind it.
  for (const uint64_t tags : {uint64_t{1}, uint64_t{3}, uint64_t{40}, uint64_t{1} << 32}) {
    std::mt19937_64 random(tags);
    table::RowIndex index(0);
    std::map<uint32_t, uint64_t> there;  // record -> hash
    std::vector<uint32_t> records;
    for (int step = 0; step < (kInstrumented ? 4000 : 20000); ++step) {
      if (records.empty() || random() % 100 < 52) {
        const auto record = static_cast<uint32_t>(random() % 100000);
        if (there.contains(record)) continue;
        const uint64_t tag = random() % tags * (0xffffffffull / tags);
        const uint64_t hash = tag << 32 | random() % 4096;
        index.insert(hash, record);
        there[record] = hash;
        records.push_back(record);
      } else {
        const size_t at = random() % records.size();
        const uint32_t record = std::exchange(records[at], records.back());
        records.pop_back();
        index.erase(there.at(record), record);
        CHECK_EQ(index.find(there.at(record), [&](uint32_t other) { return other == record; }),
                 table::RowIndex::kNone);
        there.erase(record);
      }
      if (step % 500 != 0) continue;
      for (const auto& [record, hash] : there) {
        const uint32_t wanted = record;
        CHECK_EQ(index.find(hash, [&](uint32_t other) { return other == wanted; }), wanted);
      }
    }
  }
}

TEST(rows_go_that_are_unseen_long_enough) {
  Updated one({.unseen_steps = 2});
  CHECK(one.update({1, 2, 3}).empty());
  CHECK(one.update({1}).empty());
  CHECK(one.update({1, 4}) == (std::set<int64_t>{2, 3}));
  CHECK(one.keys() == (std::set<int64_t>{1, 4}));
  CHECK_EQ(one.table.row_count(), 2u);
  CHECK_EQ(one.table.evicted_count(), 2u);
  // One of them comes again: as it began, without updates, in the place of one that went.
  const uint64_t records = one.table.record_count();
  const uint64_t bytes = one.table.size_bytes();
  std::vector<float> begun(2);
  const int64_t key = 2;
  one.table.gather({&key, 1}, begun.data());
  one.update({2});
  CHECK_EQ(one.table.record_count(), records);
  CHECK_EQ(one.table.size_bytes(), bytes);
  CHECK_EQ(one.table.header(one.record_of(2)).count, 1u);
  CHECK_EQ(one.table.weight(one.record_of(2))[0], begun[0] + 1.0f);
}

TEST(rows_with_updates_enough_stay) {
  Updated one({.unseen_steps = 1, .min_count = 3});
  one.update({1, 2});
  one.update({1, 2});
  one.update({1});
  CHECK(!one.has(2));  // after two updates
  CHECK(one.update({5}).empty());
  CHECK(one.update({6}) == (std::set<int64_t>{5}));
  CHECK(one.has(1));
  Updated rare({.min_count = 2});
  rare.update({1, 2});
  CHECK(rare.update({1}) == (std::set<int64_t>{2}));
  CHECK(rare.update({3}).empty());
}

TEST(rows_beyond_a_bound_go_in_its_order) {
  Updated lru({.max_rows = 4});
  lru.update({1, 2, 3, 4});
  lru.update({1, 1, 1, 2});
  lru.update({3});
  CHECK(lru.update({5}) == (std::set<int64_t>{4}));
  CHECK(lru.update({6, 7}) == (std::set<int64_t>{1, 2}));
  CHECK(lru.keys() == (std::set<int64_t>{3, 5, 6, 7}));
  Updated lfu({.max_rows = 4, .order = wire::EvictionOrder::kLfu});
  lfu.update({1, 2, 3, 4});
  lfu.update({1, 2, 4});
  lfu.update({1, 3, 3});
  CHECK(lfu.update({5}) == (std::set<int64_t>{2}));  // of equal ones that of the first record
  CHECK(lfu.update({6}) == (std::set<int64_t>{5}));
  CHECK(lfu.keys() == (std::set<int64_t>{1, 3, 4, 6}));
  // More rows in one update than there may be: they stay until the next one.
  Updated small({.max_rows = 2});
  small.update({1, 2});
  CHECK(small.update({3, 4, 5, 6}) == (std::set<int64_t>{1, 2}));
  CHECK_EQ(small.table.row_count(), 4u);
  CHECK_EQ(small.update({7}).size(), 3u);
  CHECK_EQ(small.table.row_count(), 2u);
  CHECK(small.has(7));
}

TEST(rows_that_others_refer_to_stay) {
  Updated one({.unseen_steps = 1, .max_rows = 2});
  one.update({1, 2});
  const std::vector<uint32_t> used = {one.record_of(1)};
  CHECK(one.update({3}, 1024, used) == (std::set<int64_t>{2}));
  CHECK(one.update({4}, 1024, used) == (std::set<int64_t>{3}));
  CHECK(one.has(1));
  CHECK(one.update({5}) == (std::set<int64_t>{1, 4}));
}

TEST(rows_go_by_the_clock) {
  using std::chrono::seconds;
  Updated one({.unseen_ms = 10'000});
  one.now += seconds(100);
  one.update({1, 2});
  one.now += seconds(9);
  CHECK(one.update({2}).empty());
  one.now += seconds(1);
  CHECK(one.update({3}) == (std::set<int64_t>{1}));
  one.now += seconds(8);
  CHECK(one.update({4}).empty());
  one.now += seconds(1);
  CHECK(one.sweep(1024) == (std::set<int64_t>{2}));
  // Moments are kept in steps: a row may go a 64th later, never before its time.
  std::mt19937 random(3);
  Updated many({.unseen_ms = 1000});
  std::map<int64_t, TimePoint> seen;
  for (int step = 0; step < 3000; ++step) {
    many.now += std::chrono::milliseconds(random() % 5);
    const int64_t key = random() % 400;
    seen[key] = many.now;
    for (const int64_t gone : many.update({key})) {
      CHECK(many.now - seen.at(gone) >= seconds(1));
      seen.erase(gone);
    }
    for (const auto& [there, time] : seen) {
      CHECK(many.now - time <= std::chrono::milliseconds(1000 + 2 * 16 + 5));
    }
  }
  CHECK(many.table.evicted_count() > 100);
}

TEST(rows_as_a_server_has_them_share_a_bound) {
  // Of 10 rows each of three servers may have 4.
  const table::Eviction third({.on = true, .max_rows = 10}, 1365, 4096);
  CHECK_EQ(third.most_rows(), 4u);
  CHECK_EQ(table::Eviction({.on = true, .max_rows = 10}, 4096, 4096).most_rows(), 10u);
  CHECK_EQ(table::Eviction({.on = true, .max_rows = 1ull << 61}, 4096, 4096).most_rows(),
           1ull << 61);
  CHECK_EQ(table::Eviction({.on = true, .unseen_steps = 1}, 4096, 4096).most_rows(), 0u);
}

TEST(a_hand_goes_round_a_table) {
  // Of each update it looks at 100 records: all rows that are to go have gone after a turn.
  Updated one({.unseen_steps = 1});
  std::vector<int64_t> keys(1000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  one.update(keys, 0);
  std::set<int64_t> gone;
  for (int turn = 0; turn < 10; ++turn) {
    CHECK_EQ(gone.size(), 100u * static_cast<size_t>(turn));
    gone.merge(one.update({5000}, 100));
  }
  CHECK(gone.size() >= 999);
  // A bound holds at once, however few it is asked to look at; what it looks at is the best part of
  // them, not all.
  Updated bounded({.max_rows = 900});
  bounded.update(keys, 0);
  CHECK_EQ(bounded.table.row_count(), 1000u);  // all of this update
  bounded.update({2000}, 0);
  CHECK_EQ(bounded.table.row_count(), 900u);
  for (int64_t key = 3000; key < 4000; ++key) {
    CHECK_EQ(bounded.update({key}, 1).size(), 1u);
    CHECK_EQ(bounded.table.row_count(), 900u);
  }
  // And no more than a sweep may free.
  Updated slow({.max_rows = 10});
  slow.update(keys, 0);
  ++slow.updates;
  CHECK_EQ(slow.sweep(0, {}, 300).size(), 300u);
  CHECK_EQ(slow.sweep(0, {}, 300).size(), 300u);
  CHECK_EQ(slow.sweep(0, {}, 900).size(), 390u);
}

// The same pushes leave the same rows in the same records.
TEST(rows_that_go_are_the_same_on_every_run) {
  const auto run = [](const wire::Eviction& rule) {
    Updated one(rule);
    std::mt19937 random(5);
    for (int step = 0; step < 300; ++step) {
      std::set<int64_t> keys;
      for (int i = 0; i < 20; ++i) keys.insert(random() % (1 + random() % 3000));
      one.update({keys.begin(), keys.end()}, 64);
    }
    std::vector<int64_t> records;
    for (uint32_t i = 0; i < one.table.record_count(); ++i) {
      records.push_back(one.table.header(i).is_row() ? one.table.header(i).key : -1);
    }
    return records;
  };
  for (const wire::Eviction& rule :
       {wire::Eviction{.unseen_steps = 20}, wire::Eviction{.max_rows = 500},
        wire::Eviction{.unseen_steps = 90,
                       .min_count = 4,
                       .max_rows = 500,
                       .order = wire::EvictionOrder::kLfu}}) {
    CHECK(run(rule) == run(rule));
  }
}

TEST(rows_that_go_are_kept_for_a_cut) {
  const auto room = std::make_shared<table::ImageRoom>(1u << 20);
  std::mt19937 random(11);
  for (int turn = 0; turn < (kInstrumented ? 20 : 200); ++turn) {
    Updated one({.unseen_steps = 3, .max_rows = 60});
    const auto some = [&] {
      std::set<int64_t> keys;
      for (int i = 0; i < 10; ++i) keys.insert(random() % 200);
      return std::vector<int64_t>(keys.begin(), keys.end());
    };
    for (int step = 0; step < 12; ++step) one.update(some());
    const auto memory = std::make_shared<table::ImageMemory>(room);
    const auto at_cut = rows_now(one);
    CHECK(at_cut.size() < one.table.record_count());  // some records were of no row then
    one.table.freeze(memory);
    // Rows go, others take their records and those that were free, and go again.
    for (int step = 0; step < turn % 9; ++step) one.update(some());
    CHECK(copied_rows(one.table) == at_cut);
    CHECK(memory->failure() == table::ImageMemory::Failure::kNone);
    one.table.thaw();
    const auto later = rows_now(one);
    one.table.freeze(memory);
    CHECK(copied_rows(one.table) == later);
    one.table.thaw();
  }
}

TEST(records_are_used_again_before_new_ones) {
  Updated one({.unseen_steps = 1});
  std::mt19937 random(17);
  for (int step = 0; step < 400; ++step) {
    std::set<int64_t> keys;
    for (int i = 0; i < 30; ++i) keys.insert(random() % 100000);
    one.update({keys.begin(), keys.end()});
    CHECK_EQ(one.table.row_count(), keys.size());
    CHECK(one.keys() == keys);
  }
  CHECK(one.table.record_count() <= 60);
  // After all rows were dropped records are numbered anew.
  one.table.clear();
  CHECK_EQ(one.table.record_count(), 0u);
  CHECK(one.update({7}).empty());
  CHECK_EQ(one.record_of(7), 0u);
}

TEST(rows_say_when_they_came_where_updates_are_counted_anew) {
  Updated one({.unseen_steps = 3});
  one.update({1});
  one.update({2});
  one.table.renumber(one.updates, 1000);
  one.updates = 1000;
  CHECK(one.update({3}).empty());
  CHECK(one.update({4}) == (std::set<int64_t>{1}));
  CHECK(one.update({4}) == (std::set<int64_t>{2}));
  // A row that was stored has had no update, and is as old as its time in the table.
  wire::TableRows rows;
  const int64_t key = 9;
  const float values[] = {1, 2};
  rows.keys = {&key, 1};
  rows.weights = values;
  one.table.store(rows);
  one.update({4});
  one.update({4});
  CHECK(one.has(9));
  one.update({4});
  one.update({4});
  CHECK(!one.has(9));
}

}  // namespace cpudist::testing
