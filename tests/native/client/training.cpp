// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Clients against real servers over the in-process network, each trainer in a thread: rounds,
// faults, interrupts and silence.

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "server/server.h"
#include "support/check.h"
#include "support/inproc_servers.h"
#include "support/patience.h"
#include "support/run_all.h"
#include "table/store.h"
#include "transport/inproc/channel.h"

namespace {

using cpudist::testing::run_all;

using namespace cpudist;  // NOLINT: a test of this namespace

constexpr uint32_t kRows = 30;
constexpr uint32_t kDim = 4;
constexpr uint32_t kElements = 10;

struct Trainer {
  std::unique_ptr<client::Client> client;
  uint32_t rank = 0;
  std::shared_ptr<client::ParamSet> set;
  std::vector<float> table = std::vector<float>(kRows * kDim);
  std::vector<float> dense = std::vector<float>(kElements);
  std::atomic<bool> interrupt{false};
  std::function<void()> handle_signal = [] {};  // runs before the interrupt is seen
};

wire::ParamSetLayout layout_on(uint32_t server_count) {
  cpudist::kernels::OptimizerConfig sgd;
  sgd.lr = 0.5;
  wire::ParamSetLayout layout;
  layout.configs = {sgd};
  layout.tables = {wire::TableSpec{"words", kRows, kDim, 0}};
  layout.blocks = {
      wire::BlockSpec{"dense.block0", 6, wire::DType::kFloat32, 0, 0, 0, 0, 1},
      wire::BlockSpec{"dense.block1", 4, wire::DType::kFloat32, server_count - 1, 0, 0, 6, 1}};
  return layout;
}

class Cluster {
 public:
  // `last_cap_bytes`: memory cap of the last server. `secret`: empty: links have no key.
  Cluster(uint32_t trainer_count, uint32_t server_count, const transport::FaultPlan& plan = {},
          uint64_t last_cap_bytes = 0, const std::string& secret = {})
      : servers_(trainer_count, server_count, plan, last_cap_bytes, secret),
        layout(layout_on(server_count)),
        trainers(trainer_count) {
    for (uint32_t r = 0; r < trainer_count; ++r) {
      trainers[r].rank = r;
      trainers[r].client = make_client(trainers[r]);
    }
    std::vector<std::function<void()>> starts;
    for (Trainer& trainer : trainers) starts.push_back([&] { start(trainer); });
    run_all(starts);
  }
  ~Cluster() {
    for (Trainer& trainer : trainers) trainer.client.reset();
  }
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  transport::FaultCounts faults() const { return servers_.faults(); }

 private:
  std::unique_ptr<client::Client> make_client(Trainer& trainer) {
    client::ClientOptions options = servers_.client_options(trainer.rank);
    options.interrupted = [&trainer] {
      if (!trainer.interrupt.exchange(false)) return false;
      trainer.handle_signal();
      return true;
    };
    return servers_.make_client(std::move(options));
  }
  void start(Trainer& trainer) {
    if (trainer.rank == 0) {
      std::iota(trainer.table.begin(), trainer.table.end(), 0.0f);
      std::iota(trainer.dense.begin(), trainer.dense.end(), 0.0f);
    }
    trainer.set = cpudist::testing::open_with_values(*trainer.client, trainer.rank, layout,
                                                     trainer.table, trainer.dense);
  }

  cpudist::testing::InprocServers servers_;

 public:
  wire::ParamSetLayout layout;
  std::vector<Trainer> trainers;
};

uint64_t step_once(Trainer& trainer, const wire::ParamSetLayout& layout, int64_t step,
                   double clip_norm = 0.0, bool clip_each = false) {
  const std::vector<int64_t> ids{step % kRows, (step * 7 + trainer.rank) % kRows, step % kRows};
  trainer.set->pull(0, ids.data(), ids.size(), false);
  std::vector<float> rows;
  for (const int64_t id : ids) {
    for (uint32_t d = 0; d < kDim; ++d) {
      rows.push_back(trainer.table[static_cast<size_t>(id) * kDim + d] * 0.01f + 1.0f);
    }
  }
  std::vector<float> gradient(kElements, 0.25f * static_cast<float>(trainer.rank + 1));
  client::StepPush push;
  push.clip_norm = clip_norm;
  push.clip_each = clip_each;
  push.configs = layout.configs;
  push.parameters = {{0, gradient.data()}};
  push.tables = {{0, ids.data(), ids.size(), rows.data()}};
  push.weights = {trainer.dense.data()};
  return trainer.set->push(push);
}

// What a script does after an interrupted step: opt.flush().
void refresh(Trainer& trainer) {
  std::vector<void*> weights{trainer.dense.data()};
  trainer.set->pull_dense(weights);
}

struct Weights {
  std::vector<float> table, dense;
  transport::FaultCounts faults;
};

Weights train(const transport::FaultPlan& plan, double clip_norm, bool clip_each = false,
              const std::string& secret = {}) {
  Cluster cluster(2, 2, plan, 0, secret);
  std::vector<std::function<void()>> calls;
  for (Trainer& trainer : cluster.trainers) {
    calls.push_back([&] {
      for (int64_t step = 0; step < 8; ++step) {
        CHECK_EQ(step_once(trainer, cluster.layout, step, clip_norm, clip_each), step);
      }
      trainer.set->pull_all_rows();
    });
  }
  run_all(calls);
  CHECK(cluster.trainers[0].table == cluster.trainers[1].table);
  CHECK(cluster.trainers[0].dense == cluster.trainers[1].dense);
  return {cluster.trainers[0].table, cluster.trainers[0].dense, cluster.faults()};
}

TEST(client_rows_are_read_between_steps_and_training_is_the_same) {
  Cluster cluster(2, 2, {});
  std::vector<std::function<void()>> calls;
  for (Trainer& trainer : cluster.trainers) {
    calls.push_back([&] {
      std::vector<int64_t> keys(kRows);
      std::iota(keys.begin(), keys.end(), 0);
      for (int64_t step = 0; step < 8; ++step) {
        CHECK_EQ(step_once(trainer, cluster.layout, step), step);
        if (trainer.rank == 0 || step == 7) trainer.set->read_rows(0, keys);
      }
      const std::vector<float> read = trainer.table;
      trainer.set->pull_all_rows();
      CHECK(trainer.table == read);
    });
  }
  run_all(calls);
  CHECK(cluster.trainers[0].table == train({}, 0.0).table);
}

TEST(client_training_averages_over_trainers) {
  const Weights weights = train({}, 0.0);
  for (uint32_t i = 0; i < kElements; ++i) {
    CHECK_NEAR(weights.dense[i], static_cast<float>(i) - 8 * 0.5f * 0.375f, 1e-5);
  }
}

TEST(client_training_is_bit_identical_under_faults) {
  transport::FaultPlan plan;
  plan.drop = 0.2;
  plan.duplicate = 0.2;
  plan.reorder = 0.2;
  plan.cut = 0.02;
  plan.seed = 3;
  for (const bool clip_each : {false, true}) {
    const Weights calm = train({}, 0.75, clip_each);
    for (const std::string& secret : {std::string(), cpudist::testing::kSecret}) {
      const Weights rough = train(plan, 0.75, clip_each, secret);
      CHECK(calm.table == rough.table);
      CHECK(calm.dense == rough.dense);
      CHECK(rough.faults.dropped > 0);
      CHECK(rough.faults.duplicated > 0);
      CHECK(rough.faults.reordered > 0);
      CHECK(rough.faults.cut > 0);
    }
  }
}

TEST(client_training_resumes_an_interrupted_push) {
  Cluster cluster(2, 2);
  Trainer& first = cluster.trainers[0];
  Trainer& second = cluster.trainers[1];
  first.interrupt = true;
  ErrorCode code = ErrorCode::kInternal;
  try {
    step_once(first, cluster.layout, 0, 0.75);
  } catch (const Error& error) {
    code = error.code();
  }
  CHECK_EQ(code, ErrorCode::kInterrupted);
  // The second phase of the interrupted round is sent when the first trainer calls again.
  run_all({[&] {
             CHECK_EQ(step_once(second, cluster.layout, 0, 0.75), 0);
             CHECK_EQ(step_once(second, cluster.layout, 1, 0.75), 1);
           },
           [&] {
             // A gradient on values from before the interrupted round is refused.
             CHECK_THROWS(step_once(first, cluster.layout, 1, 0.75), Error);
             refresh(first);
             CHECK_EQ(step_once(first, cluster.layout, 1, 0.75), 1);
           }});
  CHECK(first.dense == second.dense);
}

TEST(client_training_takes_in_answers_that_came_during_an_interrupt) {
  Cluster cluster(2, 2);
  Trainer& first = cluster.trainers[0];
  Trainer& second = cluster.trainers[1];
  std::promise<void> handling;
  std::promise<void> pushed;
  first.handle_signal = [&] {
    handling.set_value();
    pushed.get_future().wait_for(kPatience);
  };
  first.interrupt = true;
  run_all({[&] { CHECK_THROWS(step_once(first, cluster.layout, 0), Error); },
           [&] {
             handling.get_future().wait_for(kPatience);
             CHECK_EQ(step_once(second, cluster.layout, 0), 0);
             pushed.set_value();
           }});
  refresh(first);
  run_all({[&] { CHECK_EQ(step_once(first, cluster.layout, 1), 1); },
           [&] { CHECK_EQ(step_once(second, cluster.layout, 1), 1); }});
  CHECK(first.dense == second.dense);
}

// What a wait ends with need not be an Error: memory may be short.
TEST(client_training_goes_on_after_a_wait_that_had_no_memory) {
  Cluster cluster(2, 2);
  Trainer& first = cluster.trainers[0];
  Trainer& second = cluster.trainers[1];
  first.handle_signal = [] { throw std::bad_alloc(); };
  first.interrupt = true;
  CHECK_THROWS(step_once(first, cluster.layout, 0), std::bad_alloc);
  run_all({[&] { refresh(first); }, [&] { CHECK_EQ(step_once(second, cluster.layout, 0), 0); }});
  run_all({[&] { CHECK_EQ(step_once(first, cluster.layout, 1), 1); },
           [&] { CHECK_EQ(step_once(second, cluster.layout, 1), 1); }});
  CHECK(first.dense == second.dense);
}

TEST(client_training_stops_when_only_some_servers_took_a_push) {
  // The last server has room for its values and 64 bytes.
  const auto values = table::make_store(layout_on(2), 1, 2, nullptr, nullptr);
  const uint64_t cap_bytes = planned_bytes(values) + 64;
  Cluster cluster(1, 2, {}, cap_bytes);
  Trainer& trainer = cluster.trainers[0];
  const auto message = [&](ErrorCode code) -> std::string {
    try {
      step_once(trainer, cluster.layout, 0);
    } catch (const Error& error) {
      CHECK_EQ(error.code(), code);
      return error.what();
    }
    return "nothing was thrown";
  };
  const std::string limit = "memory_cap_bytes = " + std::to_string(cap_bytes);
  CHECK(message(ErrorCode::kFull).find(limit) != std::string::npos);
  const std::string text = message(ErrorCode::kClosed);
  CHECK(text.find("taken by server 0 but refused by server 1") != std::string::npos);
}

TEST(client_training_joins_after_leaving) {
  Cluster cluster(2, 2);
  Trainer& first = cluster.trainers[0];
  Trainer& second = cluster.trainers[1];
  second.set->leave();
  CHECK_EQ(step_once(first, cluster.layout, 0), 0);
  CHECK_EQ(step_once(first, cluster.layout, 1), 1);
  std::atomic<bool> joined{false};
  struct SetAtEnd {
    std::atomic<bool>& flag;
    ~SetAtEnd() { flag = true; }
  };
  run_all({[&] {
             {
               const SetAtEnd at_end{joined};
               CHECK(step_once(second, cluster.layout, 2) >= 2);
             }
             second.set->leave();
           },
           [&] {
             int64_t step = 2;
             while (!joined) step_once(first, cluster.layout, step++);
           }});
  CHECK(!second.set->is_member());
}

TEST(client_training_says_goodbye_once) {
  Cluster cluster(1, 2);
  Trainer& trainer = cluster.trainers[0];
  trainer.client->goodbye();
  trainer.client->goodbye();
  CHECK_THROWS(step_once(trainer, cluster.layout, 0), Error);
}

}  // namespace
