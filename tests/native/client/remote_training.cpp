// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// long: one world of servers and trainers, and all that is compared in it
// A static and a remote table of the same values, trained alike: every lookup finds the same bits,
// whatever the wire, the budgets and the network do.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "client/arrivals/pushes.h"
#include "support/check.h"
#include "support/inproc_servers.h"
#include "support/run_all.h"

namespace remote_training_test {

using namespace cpudist;  // NOLINT: a test of this namespace
using cpudist::testing::InprocServers;
using cpudist::testing::run_all;

constexpr uint64_t kRows = 60;
constexpr uint32_t kDim = 5;
constexpr uint32_t kStatic = 0;
constexpr uint32_t kRemote = 1;

struct Case {
  uint32_t trainers = 1;
  uint32_t servers = 1;
  wire::UpdateMode mode = wire::UpdateMode::kRounds;
  wire::WireDType push = wire::WireDType::kFloat32;
  wire::WireDType pull = wire::WireDType::kFloat32;
  client::CacheLimits limits = {};
  transport::FaultPlan plan = {};
  int ahead = 0;      // batches that are prefetched
  bool open = false;  // the remote table, whose keys are spread over all int64
};

int64_t open_key(int64_t id) {
  return static_cast<int64_t>(static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15u + (1ull << 63));
}

wire::ParamSetLayout layout_of(const Case& given) {
  cpudist::kernels::OptimizerConfig adagrad;
  adagrad.kind = cpudist::kernels::OptimizerKind::kAdagrad;
  adagrad.lr = 0.3;
  adagrad.eps = 1e-10;
  wire::ParamSetLayout layout;
  layout.mode = given.mode;
  layout.push_dtype = given.push;
  layout.pull_dtype = given.pull;
  layout.configs = {adagrad};
  layout.tables = {wire::TableSpec{"static", kRows, kDim, 0},
                   wire::TableSpec{"remote", kRows, kDim, 0}};
  layout.tables[kRemote].remote = true;
  if (given.open) {
    layout.tables[kRemote].rows = 1;  // says nothing
    layout.tables[kRemote].open = true;
  }
  return layout;
}

struct Trainer {
  uint32_t rank = 0;
  std::unique_ptr<client::Client> client;
  std::shared_ptr<client::ParamSet> set;
  std::unique_ptr<client::AsyncPushes> pushes;
  std::vector<float> weight = std::vector<float>(kRows * kDim);
  std::atomic<bool> interrupt{false};
  bool open = false;

  // Rows of the static table, as the keys of a table.
  std::vector<int64_t> keys_of(uint32_t table, const std::vector<int64_t>& ids) const {
    std::vector<int64_t> keys = ids;
    if (open && table == kRemote) std::transform(ids.begin(), ids.end(), keys.begin(), open_key);
    return keys;
  }
  std::vector<float> look_up(uint32_t table, const std::vector<int64_t>& rows, bool keep) {
    const std::vector<int64_t> ids = keys_of(table, rows);
    std::vector<float> out(ids.size() * kDim);
    const std::vector<int32_t> narrow(ids.begin(), ids.end());
    const bool are_int32 = ids.size() % 2 == 0 && !(open && table == kRemote);
    const void* const given = are_int32 ? static_cast<const void*>(narrow.data()) : ids.data();
    set->lookup(table, given, ids.size(), are_int32, out.data(), keep);
    return out;
  }
  // The rows of both tables, which are the same.
  std::vector<float> look_both_up(const std::vector<int64_t>& ids, bool keep = true) {
    const std::vector<float> rows = look_up(kStatic, ids, true);
    const std::vector<float> remote = look_up(kRemote, ids, keep);
    CHECK_EQ(std::memcmp(rows.data(), remote.data(), rows.size() * sizeof(float)), 0);
    return rows;
  }
  void step(const std::vector<int64_t>& ids, const std::vector<float>& gradient) {
    client::StepPush push;
    push.configs = set->state()->layout.configs;
    const std::vector<int64_t> keys[] = {keys_of(kStatic, ids), keys_of(kRemote, ids)};
    for (const uint32_t table : {kStatic, kRemote}) {
      push.tables.push_back({table, keys[table].data(), ids.size(), gradient.data()});
    }
    if (!pushes) {
      set->push(push);
      return;
    }
    pushes->enqueue(push);
    set->drain();
  }
};

class World {
 public:
  explicit World(const Case& given)
      : servers_(given.trainers, given.servers, given.plan), trainers(given.trainers) {
    std::vector<std::function<void()>> starts;
    for (uint32_t r = 0; r < given.trainers; ++r) {
      trainers[r].rank = r;
      client::ClientOptions options = servers_.client_options(r);
      options.interrupted = [&trainer = trainers[r]] { return trainer.interrupt.load(); };
      trainers[r].client = servers_.make_client(std::move(options));
      starts.push_back([&, r] { start(trainers[r], given); });
    }
    run_all(starts);
  }
  ~World() {
    for (Trainer& trainer : trainers) {
      trainer.pushes.reset();
      trainer.client.reset();
    }
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

 private:
  static void start(Trainer& trainer, const Case& given) {
    trainer.client->connect();
    trainer.set = trainer.client->open(layout_of(given), given.limits);
    trainer.open = given.open;
    if (trainer.rank == 0) {
      std::vector<int64_t> keys(kRows);
      std::iota(keys.begin(), keys.end(), 0);
      std::iota(trainer.weight.begin(), trainer.weight.end(), 0.125f);
      for (const uint32_t table : {kStatic, kRemote}) {
        trainer.set->store_table(table, trainer.keys_of(table, keys), trainer.weight.data(),
                                 nullptr, nullptr, 0);
      }
    }
    trainer.set->ready();
    trainer.set->bind_table(kStatic, trainer.weight.data());
    if (given.mode == wire::UpdateMode::kRounds) return;
    client::QueueOptions queue;
    queue.mean = {false};
    trainer.pushes = std::make_unique<client::AsyncPushes>(trainer.set, queue);
  }

  InprocServers servers_;

 public:
  std::vector<Trainer> trainers;
};

std::vector<int64_t> batch(int at, uint32_t rank) {
  std::vector<int64_t> ids;
  for (int i = 0; i < 9; ++i) {
    ids.push_back(static_cast<int64_t>((at * 5 + i * i * 3 + static_cast<int>(rank) * 2) %
                                       static_cast<int>(kRows)));
  }
  return ids;
}

void train_one(Trainer& trainer, const Case& given, int steps) {
  for (int at = 0; at < steps; ++at) {
    // Before any row of the step is here, unless it was prefetched.
    trainer.look_both_up({54, 2, 53, 54, 2}, false);
    if (given.ahead > 0) {
      const std::vector<int64_t> next = batch(at + given.ahead, trainer.rank);
      const std::vector<int64_t> keys = trainer.keys_of(kRemote, next);
      const std::vector<client::ComingIds> coming{{kStatic, next.data(), next.size(), false},
                                                  {kRemote, keys.data(), keys.size(), false}};
      trainer.set->prefetch(coming, false);
    }
    const std::vector<int64_t> ids = batch(at, trainer.rank);
    trainer.look_both_up({ids[0], ids[2], 59, 58, 57});
    std::vector<float> gradient = trainer.look_both_up(ids);
    trainer.look_both_up({56, ids[1], 55, 55}, false);
    for (float& value : gradient) value = 0.01f * value + 0.37f * static_cast<float>(at % 3);
    trainer.step(ids, gradient);
  }
}

// Trains, and returns the values at the end.
std::vector<float> train(const Case& given, int steps, client::ClientStats* stats) {
  World world(given);
  std::vector<std::function<void()>> calls;
  std::vector<float> last;
  for (Trainer& trainer : world.trainers) {
    calls.push_back([&] {
      train_one(trainer, given, steps);
      std::vector<int64_t> all(kRows);
      std::iota(all.begin(), all.end(), 0);
      const std::vector<float> rows = trainer.look_both_up(all);
      if (trainer.rank == 0) last = rows;
    });
  }
  run_all(calls);
  *stats = world.trainers[0].client->stats();
  return last;
}

std::vector<float> train(const Case& given, int steps = 12) {
  client::ClientStats stats;
  return train(given, steps, &stats);
}

TEST(client_remote_table_is_as_a_static_one_in_rounds) {
  const std::vector<float> one = train({.trainers = 2, .servers = 1});
  CHECK(one == train({.trainers = 2, .servers = 3}));
}

TEST(client_remote_table_is_as_a_static_one_on_arrival) {
  const auto mode = wire::UpdateMode::kOnArrival;
  CHECK(train({.servers = 1, .mode = mode}) == train({.servers = 3, .mode = mode}));
}

TEST(client_remote_table_is_as_a_static_one_with_prefetch) {
  const std::vector<float> plain = train({.trainers = 2, .servers = 3});
  for (const int ahead : {1, 3}) {
    client::ClientStats stats;
    CHECK(train({.trainers = 2, .servers = 3, .ahead = ahead}, 12, &stats) == plain);
    CHECK(stats.prefetch_hits > 0);
    CHECK(stats.prefetch_refreshed > 0);
  }
  client::ClientStats stats;
  train({.servers = 3, .mode = wire::UpdateMode::kOnArrival, .ahead = 2}, 12, &stats);
  CHECK(stats.prefetch_hits > 0);
}

TEST(client_open_table_is_as_a_static_one) {
  Case given{.trainers = 2, .servers = 3};
  const std::vector<float> plain = train(given);
  given.open = true;
  CHECK(train(given) == plain);
  given.ahead = 2;
  client::ClientStats stats;
  CHECK(train(given, 12, &stats) == plain);
  CHECK(stats.prefetch_hits > 0);
  const Case alone{.servers = 3, .mode = wire::UpdateMode::kOnArrival, .open = true};
  train(alone);
}

// Keys are coded then, and what is held back of rows is found by them.
TEST(client_open_table_is_as_a_static_one_where_values_are_rounded) {
  for (const auto push : {wire::WireDType::kBFloat16, wire::WireDType::kInt8}) {
    Case given{.trainers = 2, .servers = 3, .push = push, .pull = wire::WireDType::kBFloat16};
    const std::vector<float> plain = train(given);
    given.open = true;
    CHECK(train(given) == plain);
  }
}

TEST(client_remote_table_is_as_a_static_one_under_faults) {
  Case given{.trainers = 2, .servers = 3};
  const std::vector<float> calm = train(given);
  given.plan = {.drop = 0.1, .duplicate = 0.2, .reorder = 0.2, .cut = 0.01, .seed = 5};
  given.ahead = 2;
  CHECK(train(given) == calm);
}

TEST(client_remote_table_is_as_a_static_one_where_values_are_rounded) {
  for (const auto push : {wire::WireDType::kBFloat16, wire::WireDType::kInt8}) {
    Case given{.trainers = 2, .servers = 1, .push = push, .pull = wire::WireDType::kBFloat16};
    const std::vector<float> one = train(given);
    given.servers = 3;
    CHECK(train(given) == one);
    given.ahead = 2;
    CHECK(train(given) == one);
  }
}

// The values of the table that is not bounded are the same ones still.
TEST(client_remote_table_beyond_its_budget_is_pulled_again) {
  Case given{.trainers = 2, .servers = 3};
  const std::vector<float> plain = train(given);
  given.limits.cache_bytes = 4 * kDim * sizeof(float);
  given.ahead = 2;
  client::ClientStats stats;
  CHECK(train(given, 12, &stats) == plain);
  CHECK(stats.cache_dropped > 0);
  CHECK_EQ(stats.prefetch_hits, 0u);  // a batch to come is more than the budget
}

TEST(client_remote_table_counts_the_residues_that_it_drops) {
  Case given{.push = wire::WireDType::kInt8};
  World world(given);
  Trainer& whole = world.trainers[0];
  train_one(whole, given, 12);
  CHECK_EQ(whole.client->stats().residues_dropped, 0u);
  // Rows of three pushes do not fit into half of it.
  given.limits.residue_bytes = 30 * (kDim * sizeof(float) + 48);
  World small(given);
  Trainer& trainer = small.trainers[0];
  const std::vector<float> gradient(9 * kDim, 0.3f);
  for (int at = 0; at < 12; ++at) {
    const std::vector<int64_t> ids = batch(at, 0);
    trainer.look_up(kStatic, ids, true);
    trainer.look_up(kRemote, ids, true);
    trainer.step(ids, gradient);
  }
  CHECK(trainer.client->stats().residues_dropped > 0);
  const uint64_t dropped = trainer.client->stats().residues_dropped;
  trainer.set->close();
  CHECK_EQ(trainer.client->stats().residues_dropped, dropped);
}

TEST(client_lookup_that_is_not_kept_leaves_everything_as_it_was) {
  World world({.servers = 3});
  Trainer& trainer = world.trainers[0];
  const client::TableCache& cache = *trainer.set->state()->tables[kRemote];
  const std::vector<int64_t> kept{3, 5};
  trainer.look_both_up(kept);
  const size_t memory_bytes = cache.memory_bytes();
  const uint64_t pulled = trainer.client->stats().rows_pulled;
  // More than are looked up at once, each of them often.
  std::vector<int64_t> many(70000);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int64_t>(i % kRows);
  const std::vector<float> rows = trainer.look_up(kRemote, many, false);
  const uint64_t chunks = 3;
  // Those that are here are not pulled.
  CHECK_EQ(trainer.client->stats().rows_pulled - pulled, chunks * (kRows - kept.size()));
  CHECK(trainer.look_up(kStatic, many, false) == rows);
  CHECK_EQ(cache.memory_bytes(), memory_bytes);
  // What the next one finds is not what this one had.
  CHECK(trainer.look_up(kRemote, {7, 5, 7}, false) == trainer.look_up(kStatic, {7, 5, 7}, false));
  CHECK(cache.find_row(3) != nullptr);
  CHECK(cache.find_row(4) == nullptr);
  const std::vector<float> gradient(kDim);
  const std::vector<int64_t> passed{4};
  CHECK_THROWS(trainer.step(passed, gradient), Error);
  trainer.step(kept, std::vector<float>(2 * kDim));
  CHECK_THROWS(trainer.look_up(kRemote, {1, 60}, false), Error);
}

TEST(client_remote_table_read_outside_of_rounds_is_pulled_at_each_lookup) {
  World world({.trainers = 2});
  Trainer& first = world.trainers[0];
  Trainer& second = world.trainers[1];
  const std::vector<int64_t> ids{7};
  second.set->leave();
  const std::vector<float> before = second.look_both_up(ids);
  first.look_both_up(ids);
  first.step(ids, std::vector<float>(kDim, 1.0f));
  CHECK(second.look_both_up(ids) != before);
  CHECK(second.look_both_up(ids, false) == first.look_both_up(ids));
}

TEST(client_remote_table_has_no_weight) {
  World world({});
  Trainer& trainer = world.trainers[0];
  const auto code_of = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  const std::vector<int64_t> keys{1};
  CHECK_EQ(code_of([&] { trainer.set->bind_table(kRemote, trainer.weight.data()); }),
           ErrorCode::kInvalidArgument);
  CHECK_EQ(code_of([&] { trainer.set->read_rows(kRemote, keys); }), ErrorCode::kInvalidArgument);
  trainer.set->pull_all_rows();  // of the other one
  CHECK_EQ(trainer.client->stats().rows_pulled, kRows);
}

TEST(client_remote_pull_that_failed_is_asked_for_again) {
  World world({.servers = 3, .plan = {.delay = 1.0, .delay_ms_max = 120, .seed = 2}});
  Trainer& trainer = world.trainers[0];
  const client::TableCache& cache = *trainer.set->state()->tables[kRemote];
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const std::vector<int64_t> ids = batch(1, 0);
  for (bool failed = false; !failed;) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    trainer.set->state()->invalidate_tables();
    trainer.interrupt = true;
    try {
      trainer.look_up(kRemote, ids, true);
    } catch (const Error& error) {
      CHECK_EQ(error.code(), ErrorCode::kInterrupted);
      failed = true;
    }
    trainer.interrupt = false;
  }
  for (const int64_t id : ids) CHECK(cache.find_row(id) == nullptr);
  const uint64_t pulled = trainer.client->stats().rows_pulled;
  trainer.look_both_up(ids);
  CHECK(trainer.client->stats().rows_pulled > pulled);
  trainer.step(ids, std::vector<float>(ids.size() * kDim, 1.0f));
}

}  // namespace remote_training_test
