// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Trainers that step by themselves, each in a thread, while queues send what they moved: exchanges
// are over in time, and the servers end with everyone's movement.

#include "client/geo/exchange.h"

#include <functional>
#include <latch>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "client/client.h"
#include "server/server.h"
#include "support/check.h"
#include "support/failing_new.h"
#include "support/inproc_servers.h"
#include "support/run_all.h"
#include "transport/inproc/channel.h"

namespace {

using cpudist::testing::run_all;

using namespace cpudist;  // NOLINT: a test of this namespace

constexpr uint32_t kExchangeRows = 300;  // three slices
constexpr uint32_t kExchangeDim = 4;
constexpr uint32_t kExchangeElements = 9000;  // three slices
constexpr uint64_t kMoverInterval = 3;
constexpr int64_t kMoverSteps = 20;

struct Mover {
  uint32_t rank = 0;
  std::unique_ptr<client::Client> client;
  std::shared_ptr<client::ParamSet> set;
  std::vector<float> table = std::vector<float>(kExchangeRows * kExchangeDim);
  std::vector<float> dense = std::vector<float>(kExchangeElements);
  std::vector<uint32_t> counts = std::vector<uint32_t>(kExchangeRows);
};

class Movers {
 public:
  Movers(uint32_t trainers, uint32_t server_count, const transport::FaultPlan& plan,
         const std::string& secret = {})
      : servers_(trainers, server_count, plan, 0, secret), movers(trainers) {
    kernels::OptimizerConfig sgd;
    sgd.lr = 1.0;
    layout.mode = wire::UpdateMode::kOnArrival;
    layout.exchanges_deltas = true;
    layout.configs = {sgd};
    layout.tables = {wire::TableSpec{"words", kExchangeRows, kExchangeDim, 0}};
    layout.blocks = {
        wire::BlockSpec{"d0", 5000, wire::DType::kFloat32, 0, 0, 0, 0, 1},
        wire::BlockSpec{"d1", 4000, wire::DType::kFloat32, server_count - 1, 0, 0, 5000, 1}};
    std::vector<std::function<void()>> starts;
    for (uint32_t rank = 0; rank < trainers; ++rank) {
      movers[rank].rank = rank;
      starts.push_back([this, rank] { start(movers[rank]); });
    }
    run_all(starts);
  }
  ~Movers() {
    for (Mover& mover : movers) mover.client.reset();
  }
  Movers(const Movers&) = delete;
  Movers& operator=(const Movers&) = delete;

 private:
  void start(Mover& mover) {
    mover.client = servers_.make_client(servers_.client_options(mover.rank));
    mover.set = cpudist::testing::open_with_values(*mover.client, mover.rank, layout, mover.table,
                                                   mover.dense);
  }

  cpudist::testing::InprocServers servers_;

 public:
  wire::ParamSetLayout layout;
  std::vector<Mover> movers;
};

// Every step takes 4 from each of its rows, which all trainers share, and from all dense elements.
void step_rows(Mover& mover, client::GeoExchange& exchange, const kernels::OptimizerConfig& config,
               int64_t step) {
  std::vector<int64_t> keys(kExchangeRows);
  std::iota(keys.begin(), keys.end(), 0);
  const std::vector<float> fours(keys.size() * kExchangeDim, 4.0f);
  const client::LocalRows rows{mover.table.data(), nullptr, mover.counts.data()};
  exchange.update_rows({0, keys.data(), keys.size(), fours.data()}, rows, config, step);
}

void step_all(Mover& mover, client::GeoExchange& exchange, const kernels::OptimizerConfig& config,
              int64_t step) {
  step_rows(mover, exchange, config, step);
  for (float& element : mover.dense) element -= 4.0f;
}

void train_mover(Mover& mover, const wire::ParamSetLayout& layout,
                 const client::OuterStep& outer_step) {
  client::GeoExchange exchange(mover.set, {});
  std::vector<void*> weights{mover.dense.data()};
  exchange.reset(weights);
  bool idle = true;
  uint64_t since = 0;
  for (int64_t step = 1; step <= kMoverSteps; ++step) {
    step_all(mover, exchange, layout.configs.front(), step);
    ++since;
    if (since == kMoverInterval) {
      if (!idle) exchange.finish(weights);
      exchange.begin(false, outer_step, since, 0);
      since = 0;
      idle = false;
    }
    if (!idle) idle = exchange.keep_pace(weights, kMoverInterval - since, kMoverInterval);
    const uint64_t begun = static_cast<uint64_t>(step) / kMoverInterval;
    CHECK(exchange.stats().exchanges + 1 >= begun);
  }
  exchange.finish(weights);
  exchange.begin(true, outer_step, since, 0);
  exchange.finish(weights);
}

// Counts a trainer as done, also one that has failed.
struct Done {
  std::latch& left;
  ~Done() { left.count_down(); }
};

// What servers hold, of `part` of all movement, when trainers have left.
void check_movement(uint32_t trainers, double outer_step, double part,
                    const transport::FaultPlan& plan = {}, const std::string& secret = {}) {
  Movers all(trainers, 2, plan, secret);
  std::latch moved(trainers);
  std::vector<std::function<void()>> calls;
  for (Mover& mover : all.movers) {
    calls.push_back([&] {
      {
        const Done done{moved};
        train_mover(mover, all.layout, {outer_step, outer_step});
      }
      // Who has left is not counted any more by those that still exchange.
      moved.wait();
      mover.set->leave();
    });
  }
  run_all(calls);
  const auto expected = static_cast<float>(-4.0 * kMoverSteps * trainers * part);
  for (Mover& mover : all.movers) {
    std::vector<void*> weights{mover.dense.data()};
    mover.set->pull_dense(weights);
    mover.set->pull_all_rows();
    for (const float value : mover.dense) CHECK_NEAR(value, expected, 1e-2);
    for (const float value : mover.table) CHECK_NEAR(value, expected, 1e-2);
  }
}

// Trainer 0 moves and exchanges while its memory runs out at every place in turn; the other one
// does not move. What servers hold is `part` of all movement.
void check_movement_without_memory(double outer_step, double part) {
  Movers all(2, 2, {});
  Mover& mover = all.movers.front();
  client::GeoExchange exchange(mover.set, {});
  std::vector<void*> weights{mover.dense.data()};
  exchange.reset(weights);
  const client::OuterStep outer{outer_step, outer_step};
  int64_t steps = 0;
  int64_t failed = 0;
  const auto insist = [&](const auto& call) {
    while (true) {
      try {
        return call();
      } catch (const std::bad_alloc&) {
        ++failed;
      }
    }
  };
  cpudist::testing::at_every_allocation([&](int64_t nth) {
    for (float& element : mover.dense) element -= 4.0f;
    ++steps;
    const cpudist::testing::FailingNew failing(nth);
    insist([&] { step_rows(mover, exchange, all.layout.configs.front(), steps); });
    insist([&] { exchange.begin(false, outer, 1, 0); });
    insist([&] { exchange.finish(weights); });
    return failing.happened();
  });
  exchange.begin(true, outer, 0, 0);
  exchange.finish(weights);
  CHECK(failed > 20);
  CHECK_EQ(exchange.stats().exchanges, static_cast<uint64_t>(steps + 1));
  const auto expected = static_cast<float>(-4.0 * static_cast<double>(steps) * part);
  Mover& other = all.movers.back();
  std::vector<void*> others{other.dense.data()};
  other.set->pull_dense(others);
  other.set->pull_all_rows();
  for (const float value : other.dense) CHECK_NEAR(value, expected, 1e-2);
  for (const float value : other.table) CHECK_NEAR(value, expected, 1e-2);
}

}  // namespace

TEST(geo_exchange_hands_on_all_movement_in_time) { check_movement(2, 0.0, 1.0); }

TEST(geo_exchange_moves_servers_by_a_step_on_the_mean) {
  check_movement(4, client::kRootStep, 0.5);
  check_movement(3, 1.5, 0.5);
  check_movement(2, 1.0, 0.5);
  check_movement(2, 9.0, 1.0);  // never more than the sum
}

TEST(geo_exchange_out_of_memory_keeps_the_sum_of_all_movement) {
  check_movement_without_memory(0.0, 1.0);
  check_movement_without_memory(1.0, 0.5);
}

TEST(geo_exchange_is_in_time_over_a_bad_network) {
  transport::FaultPlan plan;
  plan.drop = 0.1;
  plan.duplicate = 0.1;
  plan.reorder = 0.1;
  plan.seed = 3;
  check_movement(2, client::kRootStep, 0.70710678, plan);
  plan.cut = 0.02;
  check_movement(2, client::kRootStep, 0.70710678, plan, cpudist::testing::kSecret);
}

TEST(geo_exchange_hands_on_what_was_moved_before_a_snapshot) {
  Movers all(2, 2, {});
  Mover& before = all.movers.front();
  std::vector<void*> old_dense{before.dense.data()};
  client::GeoExchange moved(before.set, {});
  moved.reset(old_dense);
  step_all(before, moved, all.layout.configs.front(), 1);
  const uint64_t count = moved.moved_count(0);
  CHECK_EQ(count, uint64_t{kExchangeRows});
  std::vector<int64_t> keys(count + 1, kExchangeRows);  // the last row is not here
  std::vector<float> values((count + 1) * kExchangeDim);
  std::vector<float> agreed(values.size());
  std::vector<uint8_t> touched(count + 1);
  const client::MovedArrays rows{keys.data(), values.data(), agreed.data(), touched.data()};
  moved.read_moved(0, rows);
  CHECK_EQ(std::accumulate(touched.begin(), touched.end(), uint64_t{0}), count);
  CHECK_EQ(values[5], agreed[5] - 4.0f);
  std::vector<float> was(kExchangeElements);
  moved.read_agreed(std::vector<void*>{was.data()});
  CHECK_EQ(was[7], before.dense[7] + 4.0f);

  Mover& after = all.movers.back();
  std::vector<void*> weights{after.dense.data()};
  client::GeoExchange exchange(after.set, {});
  exchange.reset(weights);
  CHECK_EQ(exchange.moved_count(0), 0u);
  CHECK_EQ(exchange.write_moved(0, count + 1, rows), count);
  exchange.write_agreed(std::vector<void*>{was.data()});
  after.dense = before.dense;
  CHECK_EQ(exchange.moved_count(0), count);
  exchange.begin(true, {}, 1, 0);
  exchange.finish(weights);
  before.set->pull_dense(old_dense);
  before.set->pull_all_rows();
  for (const float value : before.dense) CHECK_EQ(value, was[0] - 4.0f);
  for (const float value : before.table) CHECK_EQ(value, agreed[0] - 4.0f);
}
