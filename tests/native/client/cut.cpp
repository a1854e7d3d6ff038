// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Cuts of snapshots by clients against servers, each trainer in a thread, over links that lose,
// repeat and delay frames: every marker is answered once, with what all servers say, and nobody is
// stuck. The servers have no directory, so that nothing is taken: what they say of the cut tells
// whether they cut at one moment.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <vector>

#include "client/arrivals/pushes.h"
#include "support/check.h"
#include "support/inproc_servers.h"
#include "support/run_all.h"

namespace cpudist::testing::client_cuts {
namespace {

constexpr uint32_t kRows = 16;
constexpr uint32_t kDim = 2;
constexpr uint64_t kWaitMs = 20000;

struct One {
  std::unique_ptr<client::Client> client;
  std::shared_ptr<client::ParamSet> set;
  std::vector<float> table = std::vector<float>(kRows * kDim);
  std::vector<float> dense = std::vector<float>(6);
  uint64_t steps = 0;
  uint64_t marked = 0;
};

// What trainers were told, by number: each marker's answer.
class Told {
 public:
  void add(const client::CutAnswer& answer) {
    const std::lock_guard lock(mutex_);
    answers_[answer.number].push_back(answer);
  }
  // Cuts that all servers made with all markers there; those of one say the same to all.
  uint64_t check_complete(uint32_t servers) const {
    uint64_t complete = 0;
    for (const auto& [number, answers] : answers_) {
      std::set<uint64_t> said;
      for (const client::CutAnswer& answer : answers) {
        CHECK_EQ(answer.digests.size(), servers);
        CHECK(!answer.taken && !answer.reason.empty());
        said.insert(answer.digests.begin(), answer.digests.end());
      }
      if (said.contains(0)) continue;
      if (said.size() == 1) ++complete;
    }
    return complete;
  }
  size_t count() const { return answers_.size(); }
  size_t markers(uint64_t number) const { return answers_.at(number).size(); }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::vector<client::CutAnswer>> answers_;
};

class Job {
 public:
  Job(uint32_t trainers, uint32_t servers, wire::UpdateMode mode, std::vector<uint32_t> groups,
      const transport::FaultPlan& plan)
      : servers_(trainers, servers, plan), ones(trainers) {
    layout.configs = {kernels::OptimizerConfig()};
    layout.mode = mode;
    layout.trainer_groups = std::move(groups);
    layout.tables = {wire::TableSpec{"words", kRows, kDim, 0}};
    layout.blocks = {wire::BlockSpec{"dense", 6, wire::DType::kFloat32, servers - 1, 0, 0, 0, 1}};
    std::vector<std::function<void()>> starts;
    for (uint32_t r = 0; r < trainers; ++r) {
      starts.push_back([this, r] {
        One& one = ones[r];
        one.client = servers_.make_client(servers_.client_options(r));
        one.set = open_with_values(*one.client, r, layout, one.table, one.dense);
      });
    }
    run_all(starts);
  }
  ~Job() {
    for (One& one : ones) one.client.reset();
  }

  void train(const std::function<void(uint32_t)>& body) {
    std::vector<std::function<void()>> runs;
    for (uint32_t r = 0; r < ones.size(); ++r) runs.push_back([&body, r] { body(r); });
    run_all(runs);
  }

 private:
  InprocServers servers_;

 public:
  wire::ParamSetLayout layout;
  std::vector<One> ones;
};

// Calls `push` with one step.
template <typename Push>
void step_once(One& one, const wire::ParamSetLayout& layout, const Push& push) {
  const int64_t id = static_cast<int64_t>(one.steps % kRows);
  one.set->pull(0, &id, 1, false);
  const std::vector<float> row(kDim, 1.0f);
  std::vector<float> gradient(6, 1.0f);
  std::vector<void*> weights{one.dense.data()};
  client::StepPush step;
  step.configs = layout.configs;
  step.parameters = {{0, gradient.data()}};
  step.tables = {{0, &id, 1, row.data()}};
  step.weights = weights;
  push(step);
  ++one.steps;
}

transport::FaultPlan faulty(uint64_t seed) {
  transport::FaultPlan plan;
  plan.seed = seed;
  plan.drop = 0.02;
  plan.duplicate = 0.05;
  plan.delay = 0.2;
  plan.delay_ms_max = 2;
  return plan;
}

}  // namespace

TEST(cut_of_rounds_is_marked_by_each_trainer_itself) {
  Told told;
  Job job(3, 2, wire::UpdateMode::kRounds, {}, faulty(3));
  job.train([&](uint32_t r) {
    One& one = job.ones[r];
    for (int i = 0; i < 12; ++i) {
      step_once(one, job.layout, [&](const client::StepPush& step) { one.set->push(step); });
      if (one.steps % 3 == 0) told.add(one.set->mark_cut(one.steps, r == 0 ? "a" : "", kWaitMs));
    }
  });
  CHECK_EQ(told.count(), 4u);
  CHECK_EQ(told.check_complete(2), 4u);
  for (const uint64_t number : {3u, 6u, 9u, 12u}) CHECK_EQ(told.markers(number), 3u);
}

TEST(cut_of_groups_is_announced_and_marked_when_it_is_asked_for) {
  Told told;
  Job job(4, 2, wire::UpdateMode::kRounds, {0, 0, 1, 1}, faulty(4));
  job.train([&](uint32_t r) {
    One& one = job.ones[r];
    // Groups are not as fast as each other; the slower one ends after the last cut, too.
    for (int i = 0; i < 14; ++i) {
      step_once(one, job.layout, [&](const client::StepPush& step) { one.set->push(step); });
      const uint64_t wanted = one.set->cut_wanted();
      if (wanted > one.marked) {
        one.marked = wanted;
        told.add(one.set->mark_cut(wanted, r == 0 ? "a" : "", kWaitMs));
      } else if (r == 0 && i % 4 == 1 && i < 12) {
        CHECK_EQ(one.set->announce_cut(one.steps, "a", kWaitMs), std::string());
      }
    }
    one.set->leave();
  });
  CHECK(told.count() >= 3);
  CHECK_EQ(told.check_complete(2), told.count());
}

TEST(cut_on_arrival_goes_behind_the_pushes_that_wait) {
  std::mt19937_64 seeds(5);
  uint64_t complete = 0;
  for (int schedule = 0; schedule < (kInstrumented ? 3 : 12); ++schedule) {
    Told told;
    Job job(3, 3, wire::UpdateMode::kOnArrival, {}, faulty(seeds()));
    const uint64_t seed = seeds();
    job.train([&](uint32_t r) {
      One& one = job.ones[r];
      std::mt19937_64 random(seed + r);
      client::AsyncPushes pushes(one.set, {2, 3, {false}, 1});
      uint64_t number = 0;
      bool marking = false;
      const auto take = [&] {
        const auto answer = pushes.cut_answer();
        if (!answer) return;
        told.add(*answer);
        marking = false;
      };
      for (int i = 0; i < 30; ++i) {
        step_once(one, job.layout, [&](const client::StepPush& step) { pushes.enqueue(step); });
        take();
        if (r != 0 && random() % 12 == 0) {  // an evaluation
          one.set->leave();
          take();
          continue;
        }
        if (marking) continue;
        const uint64_t wanted = one.set->cut_wanted();
        if (r == 0 && random() % 4 == 0) {
          pushes.mark_cut(++number, "a", kWaitMs);
          marking = true;
        } else if (r != 0 && wanted > one.marked) {
          one.marked = wanted;
          pushes.mark_cut(wanted, "", kWaitMs);
          marking = true;
        }
      }
      one.set->leave();  // behind what is queued
      take();
      CHECK(!marking);
    });
    complete += told.check_complete(3);
  }
  CHECK(complete > 0);
}

TEST(cut_may_be_asked_of_by_status_and_abandoned) {
  Job job(1, 2, wire::UpdateMode::kRounds, {}, {});
  client::ParamSet& set = *job.ones[0].set;
  const client::CutAnswer answer = set.mark_cut(5, "a", kWaitMs);
  CHECK(!answer.taken);
  CHECK_EQ(answer.name, std::string("a"));
  CHECK(answer.reason.find("directory") != std::string::npos);
  CHECK(set.cut_status(1, 5, "").state == wire::CutState::kUnknown);
  CHECK_EQ(set.cut_status(1, 5, "").shard, 1u);
  set.abandon_cut(5);
  CHECK_THROWS(set.cut_status(2, 5, ""), Error);
  CHECK_THROWS(set.mark_cut(0, "a", kWaitMs), Error);
  CHECK_THROWS(set.mark_cut(6, "../a", kWaitMs), Error);
  CHECK(set.mark_cut(5, "a", kWaitMs).reason.find("is over") != std::string::npos);
}

TEST(cut_may_be_marked_before_the_last_marker_is_answered) {
  Job job(2, 1, wire::UpdateMode::kOnArrival, {}, {});
  client::AsyncPushes pushes(job.ones[0].set, {2, 1, {false}, 1});
  pushes.mark_cut(1, "a", kWaitMs);
  pushes.mark_cut(2, "b", kWaitMs);
  CHECK(!pushes.cut_answer());
  job.ones[1].set->leave();
  job.ones[0].set->drain();  // waits for the answers
  for (const uint64_t number : {1u, 2u}) {
    const auto answer = pushes.cut_answer();
    CHECK(answer && answer->number == number && !answer->taken);
  }
  CHECK(!pushes.cut_answer());
}

TEST(cut_answers_stay_until_they_are_taken) {
  Job job(1, 1, wire::UpdateMode::kOnArrival, {}, {});
  client::AsyncPushes pushes(job.ones[0].set, {2, 1, {false}, 1});
  for (const uint64_t number : {1u, 2u}) {
    pushes.mark_cut(number, "a", kWaitMs);
    job.ones[0].set->drain();
  }
  for (const uint64_t number : {1u, 2u}) {
    const auto answer = pushes.cut_answer();
    CHECK(answer && answer->number == number);
  }
  CHECK(!pushes.cut_answer());
}

TEST(cut_that_waits_ends_with_its_set) {
  auto job = std::make_unique<Job>(2, 1, wire::UpdateMode::kOnArrival, std::vector<uint32_t>{},
                                   transport::FaultPlan{});
  client::AsyncPushes pushes(job->ones[0].set, {2, 1, {false}, 1});
  pushes.mark_cut(1, "a", kWaitMs);
  job->ones[0].client.reset();
  job.reset();
}

}  // namespace cpudist::testing::client_cuts
