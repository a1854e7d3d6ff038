// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Dense gradients that go before their push, to servers behind links that lose, repeat, reorder and
// cut: whatever went early, and whatever became of it, values are those of pushes alone.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "client/client.h"
#include "support/check.h"
#include "support/inproc_servers.h"
#include "support/run_all.h"

namespace {

using namespace cpudist;  // NOLINT: a test of this namespace
using cpudist::testing::InprocServers;
using cpudist::testing::open_with_values;
using cpudist::testing::run_all;

constexpr uint32_t kWords = 5;
constexpr uint32_t kEach = 10;  // of each of two parameters
constexpr uint64_t kEarlySteps = 12;

// What a trainer does with the gradient of one parameter between backward and push.
enum class EarlyFate { kAlone, kSame, kChanged, kChangedTwice, kWithdrawn };

wire::ParamSetLayout early_layout(uint32_t servers) {
  kernels::OptimizerConfig sgd;
  sgd.lr = 0.5;
  wire::ParamSetLayout layout;
  layout.configs = {sgd};
  layout.tables = {wire::TableSpec{"words", kWords, 1, 0}};
  for (uint32_t p = 0; p < 2; ++p) {
    const std::string name = "dense" + std::to_string(p);
    layout.blocks.push_back({name + ".block0", 6, wire::DType::kFloat32, p % servers, 0, p, 0, 1});
    layout.blocks.push_back(
        {name + ".block1", 4, wire::DType::kFloat32, (p + 1) % servers, 0, p, 6, 1});
  }
  return layout;
}

struct EarlyTrainer {
  std::unique_ptr<client::Client> client;
  std::shared_ptr<client::ParamSet> set;
  std::vector<float> table = std::vector<float>(kWords);
  std::vector<float> dense = std::vector<float>(2 * kEach);
  std::atomic<bool> interrupt{false};
};

class EarlyJob {
 public:
  EarlyJob(uint32_t trainers, uint32_t servers, const transport::FaultPlan& plan,
           uint64_t last_cap_bytes = 0, const std::string& secret = {})
      : layout(early_layout(servers)),
        servers_(trainers, servers, plan, last_cap_bytes, secret),
        trainers_(trainers) {
    std::vector<std::function<void()>> starts;
    for (uint32_t rank = 0; rank < trainers; ++rank) {
      starts.push_back([this, rank] {
        EarlyTrainer& one = trainers_[rank];
        client::ClientOptions options = servers_.client_options(rank);
        options.interrupted = [&one] { return one.interrupt.exchange(false); };
        one.client = servers_.make_client(std::move(options));
        if (rank == 0) std::iota(one.dense.begin(), one.dense.end(), 0.0f);
        one.client->connect();
        one.set = one.client->open(layout);
        if (rank == 0) {
          std::vector<int64_t> keys(kWords);
          std::iota(keys.begin(), keys.end(), 0);
          one.set->store_table(0, keys, one.table.data(), nullptr, nullptr, 0);
          one.set->store_parameter(0, one.dense.data(), nullptr, 0);
          one.set->store_parameter(1, one.dense.data() + kEach, nullptr, 0);
        }
        one.set->ready();
        one.set->bind_table(0, one.table.data());
        one.set->pull_dense(weights(one));
      });
    }
    run_all(starts);
  }
  ~EarlyJob() {
    for (EarlyTrainer& one : trainers_) one.client.reset();
  }
  EarlyJob(const EarlyJob&) = delete;
  EarlyJob& operator=(const EarlyJob&) = delete;

  static std::vector<void*> weights(EarlyTrainer& one) {
    return {one.dense.data(), one.dense.data() + kEach};
  }
  EarlyTrainer& trainer(uint32_t rank) { return trainers_[rank]; }
  transport::FaultCounts faults() const { return servers_.faults(); }

  // `early`: nothing goes before its push where it is false, with the same pushes.
  uint64_t step(uint32_t rank, uint64_t number, const std::vector<EarlyFate>& fates, bool early,
                double clip_norm = 0.0) {
    EarlyTrainer& one = trainers_[rank];
    client::StepPush push;
    push.configs = layout.configs;
    push.clip_norm = clip_norm;
    std::vector<float> gradients(2 * kEach);
    uint64_t went_bytes = 0;
    for (uint32_t p = 0; p < 2; ++p) {
      float* const gradient = gradients.data() + p * kEach;
      const float value = 0.125f * static_cast<float>(rank + 1 + number % 3 + p);
      std::fill_n(gradient, kEach, value);
      if (fates[p] == EarlyFate::kAlone) {
        push.parameters.push_back({p, gradient});
        continue;
      }
      const client::ParameterGradient ready{p, gradient};
      if (early) went_bytes += one.set->push_early({&ready, 1});
      if (fates[p] == EarlyFate::kWithdrawn) continue;
      if (fates[p] != EarlyFate::kSame) gradient[number % kEach] += 2.0f;
      if (fates[p] == EarlyFate::kChangedTwice) {  // a further backward
        if (early) CHECK_EQ(one.set->push_early({&ready, 1}), 0);
        gradient[9] -= 1.0f;
      }
      push.parameters.push_back({p, gradient});
    }
    push.weights = weights(one);
    one.set->push(push);
    return went_bytes;
  }

  wire::ParamSetLayout layout;

 private:
  InprocServers servers_;
  std::vector<EarlyTrainer> trainers_;
};

std::vector<EarlyFate> early_fates(std::mt19937& drawn) {
  std::vector<EarlyFate> fates;
  for (int p = 0; p < 2; ++p) fates.push_back(static_cast<EarlyFate>(drawn() % 5));
  return fates;
}

struct EarlyOutcome {
  std::vector<float> dense;
  uint64_t went_bytes = 0;
  uint64_t changed_bytes = 0;
  transport::FaultCounts faults;
};

EarlyOutcome train_early(uint32_t trainers, uint32_t servers, const transport::FaultPlan& plan,
                         bool early, double clip_norm, const std::string& secret = {}) {
  EarlyJob job(trainers, servers, plan, 0, secret);
  std::vector<uint64_t> went(trainers);
  std::vector<std::function<void()>> calls;
  for (uint32_t rank = 0; rank < trainers; ++rank) {
    calls.push_back([&, rank] {
      std::mt19937 drawn(17 + rank);
      for (uint64_t step = 0; step < kEarlySteps; ++step) {
        went[rank] += job.step(rank, step, early_fates(drawn), early, clip_norm);
      }
    });
  }
  run_all(calls);
  EarlyOutcome outcome;
  outcome.dense = job.trainer(0).dense;
  for (uint32_t rank = 0; rank < trainers; ++rank) {
    CHECK(job.trainer(rank).dense == outcome.dense);
    const auto [sent, changed] = job.trainer(rank).set->early_bytes();
    CHECK_EQ(sent, went[rank]);
    outcome.went_bytes += sent;
    outcome.changed_bytes += changed;
  }
  outcome.faults = job.faults();
  return outcome;
}

transport::FaultPlan rough_links(uint64_t seed) {
  transport::FaultPlan plan;
  plan.drop = 0.15;
  plan.duplicate = 0.15;
  plan.reorder = 0.15;
  plan.cut = 0.02;
  plan.seed = seed;
  return plan;
}

}  // namespace

TEST(client_early_gradients_change_no_bit_whatever_becomes_of_them) {
  uint64_t seed = 1;
  for (const uint32_t trainers : {1u, 2u, 3u}) {
    for (const double clip_norm : {0.0, 0.5}) {
      const EarlyOutcome pushes = train_early(trainers, 2, {}, false, clip_norm);
      CHECK_EQ(pushes.went_bytes, 0);
      // Half of them with a key: a link that is cut proves it anew.
      const std::string secret = clip_norm > 0 ? cpudist::testing::kSecret : std::string();
      const EarlyOutcome early =
          train_early(trainers, 2, rough_links(seed++), true, clip_norm, secret);
      CHECK(early.dense == pushes.dense);
      CHECK(early.went_bytes > 0);
      CHECK(early.changed_bytes > 0);
      CHECK(early.changed_bytes < early.went_bytes);
      CHECK(early.faults.dropped > 0);
      CHECK(early.faults.reordered > 0);
    }
  }
}

TEST(client_early_gradients_stay_here_where_a_link_costs_nothing) {
  EarlyJob job(1, 2, {});
  CHECK(!job.trainer(0).set->may_push_early());
  CHECK_EQ(job.step(0, 0, {EarlyFate::kSame, EarlyFate::kSame}, true), 0);
}

TEST(client_early_gradients_go_to_no_server_with_a_memory_cap) {
  EarlyJob job(1, 2, rough_links(5), 1 << 20);
  CHECK(job.trainer(0).set->may_push_early());
  // Of both parameters what the first server has: 6 and 4 elements.
  CHECK_EQ(job.step(0, 0, {EarlyFate::kSame, EarlyFate::kSame}, true), 10 * sizeof(float));
  EarlyJob capped(1, 1, rough_links(6), 1 << 20);
  CHECK(!capped.trainer(0).set->may_push_early());
}

TEST(client_early_gradients_of_a_step_that_never_came_are_dropped) {
  const auto train_after = [](bool early) {
    EarlyJob job(1, 2, rough_links(9));
    EarlyTrainer& one = job.trainer(0);
    std::vector<float> gradient(kEach, 8.0f);
    const client::ParameterGradient ready{0, gradient.data()};
    if (early) CHECK_EQ(one.set->push_early({&ready, 1}), kEach * sizeof(float));
    one.set->leave();
    if (early) CHECK_EQ(one.set->push_early({&ready, 1}), 0);
    one.set->join();
    for (uint64_t step = 0; step < 3; ++step) {
      job.step(0, step, {EarlyFate::kSame, EarlyFate::kAlone}, early);
    }
    return one.dense;
  };
  CHECK(train_after(true) == train_after(false));
}

// The next call on the client finishes the step that was interrupted, whatever of its parts is
// still to be answered or sent again by then.
TEST(client_early_gradients_of_an_interrupted_step_are_finished_by_the_next_call) {
  const auto train_with = [](bool interrupts, const transport::FaultPlan& plan) {
    EarlyJob job(2, 2, plan);
    std::atomic<uint64_t> interrupted{0};
    std::vector<std::function<void()>> calls;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      calls.push_back([&, rank] {
        EarlyTrainer& one = job.trainer(rank);
        for (uint64_t step = 0; step < kEarlySteps; ++step) {
          const bool now = interrupts && step % 3 == 1;
          one.interrupt = now && rank == 0;
          // Trainer 0 waits for this one, and is interrupted meanwhile.
          while (now && rank == 1 && interrupted < step / 3 + 1) std::this_thread::yield();
          try {
            job.step(rank, step, {EarlyFate::kSame, EarlyFate::kChanged}, interrupts);
          } catch (const Error& error) {
            CHECK(error.code() == ErrorCode::kInterrupted);
            ++interrupted;
            one.set->pull_dense(EarlyJob::weights(one));  // what opt.flush() does
          }
          one.interrupt = false;
        }
      });
    }
    run_all(calls);
    CHECK_EQ(interrupted.load() > 0, interrupts);
    CHECK(job.trainer(0).dense == job.trainer(1).dense);
    return job.trainer(0).dense;
  };
  const std::vector<float> calm = train_with(false, {});
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    CHECK(train_with(true, rough_links(40 + seed)) == calm);
  }
}
