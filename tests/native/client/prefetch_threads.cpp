// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Lookups in several threads while another one declares batches and steps: for the thread
// sanitizer, and what lookups find.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "client/arrivals/pushes.h"
#include "client/client.h"
#include "server/server.h"
#include "support/check.h"
#include "support/failing_new.h"
#include "transport/inproc/channel.h"

namespace {

using namespace cpudist;  // NOLINT: a test of this namespace

constexpr uint32_t kRowsEach = 64;
constexpr uint32_t kTables = 2;
constexpr int kSteps = 300;
constexpr int kAhead = 4;

// One trainer and one server.
class Pair {
 public:
  Pair(wire::UpdateMode mode, bool remote)
      : network_(transport::InprocNetwork::create({})),
        tables(kTables, std::vector<float>(kRowsEach)) {
    server::ServerOptions options;
    options.run_id = 7;
    options.server_count = options.trainer_count = 1;
    server_ = std::make_unique<server::Server>(options);
    listener_ = network_->listen("server", server_.get());
    cpudist::kernels::OptimizerConfig sgd;
    sgd.lr = 1.0;
    layout.mode = mode;
    layout.configs = {sgd};
    for (uint32_t t = 0; t < kTables; ++t) {
      layout.tables.push_back(wire::TableSpec{"table" + std::to_string(t), kRowsEach, 1, 0});
      layout.tables[t].remote = remote;
    }
    client::ClientOptions client_options;
    client_options.run_id = 7;
    client_options.trainer_count = 1;
    client_options.servers = {listener_->addresses()};
    client = std::make_unique<client::Client>(
        client_options, [this](transport::ConnectionHandler* handler) {
          return make_connector(network_->connector(handler), nullptr);
        });
    open(mode);
  }
  ~Pair() {
    client.reset();
    server_->stop();
    listener_->stop();
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

 private:
  void open(wire::UpdateMode mode) {
    client->connect();
    set = client->open(layout);
    std::vector<int64_t> keys(kRowsEach);
    std::iota(keys.begin(), keys.end(), 0);
    for (uint32_t t = 0; t < kTables; ++t) {
      set->store_table(t, keys, tables[t].data(), nullptr, nullptr, 0);
    }
    set->ready();
    for (uint32_t t = 0; t < kTables; ++t) {
      if (!layout.tables[t].remote) set->bind_table(t, tables[t].data());
    }
    if (mode == wire::UpdateMode::kRounds) return;
    client::QueueOptions queue;
    queue.mean = {false};
    pushes = std::make_unique<client::AsyncPushes>(set, queue);
  }

  std::shared_ptr<transport::InprocNetwork> network_;
  std::unique_ptr<server::Server> server_;
  std::unique_ptr<transport::Listener> listener_;

 public:
  std::vector<std::vector<float>> tables;
  wire::ParamSetLayout layout;
  std::unique_ptr<client::Client> client;
  std::shared_ptr<client::ParamSet> set;
  std::unique_ptr<client::AsyncPushes> pushes;
};

// Rows of a remote table are kept for a gradient, or not. Whether they are sums of updates.
bool look_up(Pair& pair, uint32_t table, std::span<const int64_t> ids, bool keep = true) {
  if (!pair.layout.tables[table].remote) {
    pair.set->pull(table, ids.data(), ids.size(), false);
    return true;
  }
  std::vector<float> rows(ids.size(), 1.0f);
  pair.set->lookup(table, ids.data(), ids.size(), false, rows.data(), keep);
  return std::all_of(rows.begin(), rows.end(),
                     [](float value) { return value <= 0.0f && value == std::floor(value); });
}

std::vector<float> all_rows(Pair& pair, uint32_t table) {
  if (!pair.layout.tables[table].remote) return pair.tables[table];
  std::vector<int64_t> ids(kRowsEach);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<float> rows(kRowsEach);
  pair.set->lookup(table, ids.data(), ids.size(), false, rows.data(), false);
  return rows;
}

void step(Pair& pair, wire::UpdateMode mode, std::span<const int64_t> ids) {
  const std::vector<float> rows(ids.size(), 1.0f);
  client::StepPush push;
  push.configs = pair.layout.configs;
  for (uint32_t t = 0; t < kTables; ++t) {
    push.tables.push_back({t, ids.data(), ids.size(), rows.data()});
  }
  if (mode == wire::UpdateMode::kRounds) {
    pair.set->push(push);
  } else {
    pair.pushes->enqueue(push);
  }
}

std::vector<int64_t> batch(int at) {
  return {at % kRowsEach, (at + 20) % kRowsEach, (3 * at + 40) % kRowsEach};
}

// As a forward that begins: the batch's rows of all tables at once, and those of one more table
// that has no such row.
void foresee(Pair& pair, std::span<const int64_t> ids) {
  std::vector<client::GuessedIds> guesses;
  for (uint32_t t = kTables; t-- > 0;) {
    guesses.push_back(
        {t, ids.data(), client::IdType::kInt64, {static_cast<int64_t>(ids.size())}, {1}});
  }
  const int64_t none = kRowsEach;
  guesses.push_back({0, &none, client::IdType::kInt64, {1}, {1}});
  CHECK_EQ(pair.set->pull_together(guesses).back(), 0u);
}

// Each step declares a batch to come, looks its own up, and pushes ones; others look rows up all
// the time, those of batches to come.
void train_beside_lookups(wire::UpdateMode mode, bool remote = false) {
  Pair pair(mode, remote);
  std::atomic<bool> stop{false};
  std::atomic<int> now{0};
  std::atomic<bool> wrong{false};
  std::vector<std::thread> readers;
  for (uint32_t t = 0; t < kTables; ++t) {
    readers.emplace_back([&pair, &stop, &now, &wrong, t] {
      for (int i = 0; !stop; ++i) {
        const bool keep = i % 3 > 0;
        if (!look_up(pair, t, batch(now.load() + i % (kAhead + 1)), keep)) wrong = true;
      }
    });
  }
  readers.emplace_back([&pair, &stop, &now] {
    for (int i = 0; !stop; ++i) foresee(pair, batch(now.load() + i % (kAhead + 1)));
  });
  std::vector<float> expected(kRowsEach);
  for (int at = 0; at < kSteps; ++at) {
    now = at;
    const auto ids = batch(at);
    const auto next = batch(at + kAhead);
    const std::vector<client::ComingIds> coming{{0, next.data(), next.size(), false},
                                                {1, next.data(), next.size(), false}};
    pair.set->prefetch(coming, false);
    if (at % 2 == 0) foresee(pair, ids);
    for (uint32_t t = 0; t < kTables; ++t) {
      if (!look_up(pair, t, ids)) wrong = true;
    }
    step(pair, mode, ids);
    for (const int64_t id : ids) expected[static_cast<size_t>(id)] -= 1.0f;
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  pair.set->drain();
  pair.set->leave();
  pair.set->pull_all_rows();
  for (uint32_t t = 0; t < kTables; ++t) CHECK(all_rows(pair, t) == expected);
  CHECK(!wrong);
}

// Rows that were marked as being on their way, and not asked for, are asked for the next time.
TEST(prefetch_that_finds_no_memory_leaves_no_row_on_its_way) {
  for (const bool remote : {false, true}) {
    int64_t failed = 0;
    cpudist::testing::at_every_allocation([&](int64_t nth) {
      Pair pair(wire::UpdateMode::kRounds, remote);
      std::vector<int64_t> ids(16);
      std::iota(ids.begin(), ids.end(), 0);
      const client::ComingIds coming[] = {{0, ids.data(), ids.size(), false},
                                          {1, ids.data(), ids.size(), false}};
      bool happened = false;
      bool refused = false;
      {
        const cpudist::testing::FailingNew failing(nth);
        try {
          pair.set->prefetch(coming, false);
        } catch (const std::exception&) {
          refused = true;
        }
        happened = failing.happened();
      }
      if (!refused) return happened;
      ++failed;
      const uint64_t before = pair.client->stats().rows_prefetched;
      pair.set->prefetch(coming, false);
      CHECK_EQ(pair.client->stats().rows_prefetched - before, 2 * ids.size());
      return happened;
    });
    CHECK(failed > 10);
  }
}

}  // namespace

TEST(prefetch_beside_lookups_of_other_threads_in_rounds) {
  train_beside_lookups(wire::UpdateMode::kRounds);
}

TEST(prefetch_beside_lookups_of_other_threads_on_arrival) {
  train_beside_lookups(wire::UpdateMode::kOnArrival);
}

TEST(prefetch_beside_lookups_of_remote_tables_in_rounds) {
  train_beside_lookups(wire::UpdateMode::kRounds, true);
}

TEST(prefetch_beside_lookups_of_remote_tables_on_arrival) {
  train_beside_lookups(wire::UpdateMode::kOnArrival, true);
}
