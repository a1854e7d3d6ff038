// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A server whose rows go, against a dictionary, over random eviction_schedules of pushes, pulls,
// rows that are held over pushes, and shrinking: by rounds of one group or of two, and on arrival
// with a bound on staleness, where pushes wait while others evict their rows.
//
// CPUDIST_TEST_SCHEDULES=100000 in the environment runs so many of them.

#include <array>
#include <cstdlib>
#include <map>
#include <random>
#include <set>

#include "support/remote_fixture.h"

namespace cpudist::testing {
namespace {

constexpr float kBegun = 3.0f;
constexpr int64_t kModelKeys = 24;

using RowGradients = std::vector<RowGradient>;

// What a table with one server is to do; values are small multiples of a power of 2, so that sums
// are exact.
class RowDictionary {
 public:
  explicit RowDictionary(const wire::Eviction& rule) : rule_(rule) {}

  float value(int64_t key) const {
    const auto found = rows_.find(key);
    return found == rows_.end() ? kBegun : found->second.value;
  }
  size_t size() const { return rows_.size(); }
  uint64_t created() const { return created_; }
  uint64_t evicted() const { return evicted_; }
  uint64_t updates() const { return updates_; }

  // Pushes by rank.
  void update(const std::map<uint32_t, RowGradients>& pushes) {
    std::map<int64_t, float> sums;
    for (const auto& [rank, rows] : pushes) {
      for (const RowGradient& row : rows) {
        if (!rows_.contains(row.key)) make(row.key);
        sums[row.key] += row.value;
      }
    }
    for (const auto& [key, sum] : sums) {
      Row& row = rows_.at(key);
      row.value -= sum / static_cast<float>(pushes.size());
      ++row.count;
      row.last = updates_;
    }
    ++updates_;
    sweep();
  }
  uint64_t sweep() {
    std::vector<std::pair<std::array<int64_t, 3>, int64_t>> left;  // by what goes first
    std::map<uint32_t, int64_t> goes;                              // by record
    for (const auto& [key, row] : rows_) {
      const auto age = static_cast<int64_t>(updates_) - 1 - static_cast<int64_t>(row.last);
      if (age <= 0) continue;
      const bool asked = rule_.unseen_steps > 0 || rule_.min_count > 0;
      const bool old = age >= static_cast<int64_t>(rule_.unseen_steps);
      if (asked && old && (rule_.min_count == 0 || row.count < rule_.min_count)) {
        goes[row.record] = key;
        continue;
      }
      const int64_t count = row.count;
      const bool lfu = rule_.order == wire::EvictionOrder::kLfu;
      left.push_back({{lfu ? count : -age, lfu ? -age : count, row.record}, key});
    }
    std::sort(left.begin(), left.end());
    for (const auto& [rank, key] : left) {
      if (rule_.max_rows == 0 || rows_.size() - goes.size() <= rule_.max_rows) break;
      goes[rows_.at(key).record] = key;
    }
    for (auto one = goes.rbegin(); one != goes.rend(); ++one) {
      free_.push_back(one->first);
      rows_.erase(one->second);
    }
    evicted_ += goes.size();
    return goes.size();
  }

 private:
  struct Row {
    float value = kBegun;
    uint32_t count = 0;
    uint64_t last = 0;
    uint32_t record = 0;
  };

  void make(int64_t key) {
    Row row;
    row.last = updates_;
    row.record = free_.empty() ? next_++ : free_.back();
    if (!free_.empty()) free_.pop_back();
    rows_[key] = row;
    ++created_;
  }

  const wire::Eviction rule_;
  std::map<int64_t, Row> rows_;
  std::vector<uint32_t> free_;
  uint32_t next_ = 0;
  uint64_t updates_ = 0;
  uint64_t created_ = 0;
  uint64_t evicted_ = 0;
};

enum class EvictionWay { kOneGroup, kTwoGroups, kOnArrival };

wire::Eviction random_rule(std::mt19937& random) {
  wire::Eviction rule;
  rule.on = true;
  const uint32_t kind = random() % 4;
  if (kind != 1) rule.unseen_steps = 1 + random() % 4;
  if (kind == 1 || kind == 2) rule.max_rows = 1 + random() % 12;
  if (rule.max_rows > 0 && random() % 2 == 0) rule.order = wire::EvictionOrder::kLfu;
  if (kind == 3) rule.min_count = 1 + random() % 4;
  return rule;
}

wire::ParamSetLayout evicting_layout_of(EvictionWay way, const wire::Eviction& rule) {
  wire::ParamSetLayout layout = remote_layout();
  layout.tables[0].initial = {{kernels::InitialOp::kFill, kBegun, 0}};
  layout.tables[0].overrides = {};
  layout.tables[0].eviction = rule;
  if (way == EvictionWay::kTwoGroups) layout.trainer_groups = {0, 1, 0};
  if (way == EvictionWay::kOnArrival) {
    layout.mode = wire::UpdateMode::kOnArrival;
    layout.max_staleness = 2;
  }
  return layout;
}

struct EvictionSchedule {
  struct Waiting {
    uint64_t request = 0;
    RowGradients rows;
    std::map<int64_t, float> held;  // of rounds
    uint64_t read = 0;              // of arrivals: after so many updates
  };

  EvictionWay way;
  std::mt19937 random;
  wire::Eviction rule;
  World world;
  RowDictionary model;
  std::map<uint32_t, Waiting> waiting;
  std::vector<uint64_t> rounds = std::vector<uint64_t>(3);  // of each trainer's group
  std::vector<uint64_t> reads = std::vector<uint64_t>(3);
  uint64_t compared = 0;

  EvictionSchedule(EvictionWay chosen, uint32_t seed)
      : way(chosen),
        random(seed),
        rule(random_rule(random)),
        world(evicting_layout_of(way, rule), server_options(way == EvictionWay::kOneGroup ? 2 : 3),
              false),
        model(rule) {
    make_ready(world);
  }

  std::vector<int64_t> some_keys(uint32_t most) {
    std::set<int64_t> keys;
    const uint32_t count = random() % (most + 1);
    for (uint32_t i = 0; i < count; ++i) keys.insert(random() % kModelKeys);
    std::vector<int64_t> shuffled(keys.begin(), keys.end());
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    return shuffled;
  }

  void push(uint32_t rank) {
    if (waiting.contains(rank)) return;
    Waiting& mine = waiting[rank];
    for (const int64_t key : some_keys(5)) {
      mine.rows.push_back({key, static_cast<float>(random() % 8)});
    }
    wire::PushHeader header;
    header.configs = world.layout.configs;
    header.round = rounds[rank];
    wire::HoldRefs holds;
    std::vector<int64_t> held;
    if (way != EvictionWay::kOnArrival) held = some_keys(6);
    if (!held.empty()) {
      const auto values = pulled_rows(world[rank], world.layout, held);
      for (size_t i = 0; i < held.size(); ++i) mine.held[held[i]] = values[i * 4];
      holds.since = model.updates();
      holds.tables = {{0, held.size(), 4, 0, false, 0}};
    }
    const wire::TableRef table{0, mine.rows.size(), 4, 0, false, 0};
    wire::FilledPush push = wire::layout_push(header, {}, std::span(&table, 1), nullptr,
                                              held.empty() ? nullptr : &holds);
    for (size_t i = 0; i < mine.rows.size(); ++i) {
      push.keys[0][i] = mine.rows[i].key;
      std::fill_n(push.rows[0] + i * 4, 4, mine.rows[i].value);
    }
    if (!held.empty()) std::copy(held.begin(), held.end(), push.held[0]);
    mine.read = reads[rank];
    mine.request = world[rank].ask(wire::FrameKind::kPush, std::move(push.payload));
    way == EvictionWay::kOnArrival ? follow_arrivals(rank) : follow_rounds();
  }

  // At most one round was completed.
  void follow_rounds() {
    std::map<uint32_t, RowGradients> pushes;
    for (const auto& [rank, one] : waiting) {
      if (!world[rank].waits(one.request)) pushes[rank] = one.rows;
    }
    if (pushes.empty()) return;
    model.update(pushes);
    for (const auto& [rank, rows] : pushes) {
      Waiting mine = waiting.extract(rank).mapped();
      ++rounds[rank];
      const wire::Frame frame = world[rank].reply(mine.request);
      const wire::DenseView reply = world.dense(frame);
      for (const wire::TableSection& told : reply.tables) {
        for (size_t i = 0; i < told.keys.size(); ++i) {
          CHECK(mine.held.contains(told.keys[i]));
          mine.held[told.keys[i]] = told.rows[i * 4];
        }
      }
      for (const auto& [key, value] : mine.held) {
        CHECK_EQ(value, model.value(key));
        ++compared;
      }
    }
  }

  // The one that came, then those that waited for it: the longest first.
  void follow_arrivals(uint32_t came) {
    std::vector<std::array<uint64_t, 3>> applied;
    for (const auto& [rank, one] : waiting) {
      if (!world[rank].waits(one.request)) applied.push_back({rank != came, one.read, rank});
    }
    std::sort(applied.begin(), applied.end());
    for (const auto& [unused, read, number] : applied) {
      const auto rank = static_cast<uint32_t>(number);
      world[rank].reply(waiting.at(rank).request);
      model.update({{rank, waiting.extract(rank).mapped().rows}});
      reads[rank] = model.updates();
    }
  }

  void pull() {
    std::vector<int64_t> keys(kModelKeys);
    for (int64_t key = 0; key < kModelKeys; ++key) keys[static_cast<size_t>(key)] = key;
    const auto values = pulled_rows(world[0], world.layout, keys);
    for (const int64_t key : keys) {
      for (size_t c = 0; c < 4; ++c) {
        CHECK_EQ(values[static_cast<size_t>(key) * 4 + c], model.value(key));
      }
    }
    const server::TableStats stats = world.server.table_stats()[0];
    CHECK_EQ(stats.rows, model.size());
    CHECK_EQ(stats.created, model.created());
    CHECK_EQ(stats.evicted, model.evicted());
    CHECK_EQ(world.server.stats().rounds, model.updates());
  }

  void shrink() {
    Trainer& trainer = world[world.trainers.size() - 1];
    if (waiting.contains(trainer.rank())) return;  // its requests come one after the other
    const uint64_t request = trainer.ask(wire::FrameKind::kShrink, encode(wire::TableQuery{0}));
    CHECK(trainer.comes(request));
    const uint64_t evicted = wire::decode_shrunk(view(trainer.reply(request).payload)).evicted;
    CHECK_EQ(evicted, model.sweep());
  }

  void run() {
    const uint32_t steps = 10 + random() % 40;
    for (uint32_t step = 0; step < steps; ++step) {
      push(random() % static_cast<uint32_t>(world.trainers.size()));
      if (random() % 4 == 0) pull();
      if (random() % 16 == 0) shrink();
    }
    pull();
  }
};

uint64_t eviction_schedules() {
  if (const char* given = std::getenv("CPUDIST_TEST_SCHEDULES")) return std::stoull(given);
  return kInstrumented ? 30 : 300;
}

void run_evictions(EvictionWay way) {
  uint64_t compared = 0;
  uint64_t evicted = 0;
  for (uint64_t i = 0; i < (eviction_schedules() + 2) / 3; ++i) {
    EvictionSchedule schedule(way, static_cast<uint32_t>(i * 3 + static_cast<uint64_t>(way)));
    try {
      schedule.run();
    } catch (const CheckFailure& failure) {
      fail(__FILE__, __LINE__, "schedule " + std::to_string(i) + ": " + failure.what());
    }
    compared += schedule.compared;
    evicted += schedule.model.evicted();
  }
  CHECK(evicted > 0);
  CHECK_EQ(compared > 0, way != EvictionWay::kOnArrival);
}

}  // namespace

TEST(eviction_model_of_rounds) { run_evictions(EvictionWay::kOneGroup); }

TEST(eviction_model_of_rounds_of_two_groups) { run_evictions(EvictionWay::kTwoGroups); }

TEST(eviction_model_of_updates_on_arrival) { run_evictions(EvictionWay::kOnArrival); }

}  // namespace cpudist::testing
