// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one fixture and the tests that need it
// The queue of a trainer whose updates are applied on arrival: order, room, failures, and that
// every gradient is applied exactly once.

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "client/arrivals/pushes.h"
#include "client/client.h"
#include "server/server.h"
#include "support/check.h"
#include "support/patience.h"
#include "support/run_all.h"
#include "table/store.h"
#include "transport/inproc/channel.h"

namespace {

using cpudist::testing::run_all;

using namespace cpudist;  // NOLINT: a test of this namespace

constexpr uint32_t kQueueDim = 4;

constexpr uint32_t kQueueRows = 24;

// Counts pushes, and keeps them, or frames of another kind, back while it is closed.
class Gate final : public transport::ConnectionHandler {
 public:
  explicit Gate(server::Server& server) : server_(server) {}
  void on_open(const std::shared_ptr<transport::Connection>& connection) override {
    server_.on_open(connection);
  }
  void on_frame(const std::shared_ptr<transport::Connection>& connection,
                wire::Frame frame) override {
    if (frame.header.kind == wire::FrameKind::kPush) ++pushes;
    if (frame.header.kind == held_) {
      std::unique_lock lock(mutex_);
      opened_.wait_for(lock, kPatience, [this] { return open_; });
      if (loses_) return;
    }
    server_.on_frame(connection, std::move(frame));
  }
  void on_close(const std::shared_ptr<transport::Connection>& connection,
                const std::string& reason) override {
    server_.on_close(connection, reason);
  }
  void set(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    opened_.notify_all();
  }
  // What it has kept back is lost.
  void open_to_nobody() {
    loses_ = true;
    set(true);
  }
  // Is closed to frames of this kind.
  void hold(wire::FrameKind kind) {
    held_ = kind;
    set(false);
  }
  std::atomic<int> pushes{0};

 private:
  server::Server& server_;
  std::atomic<wire::FrameKind> held_{wire::FrameKind::kPush};
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = true;
  std::atomic<bool> loses_{false};
};

struct Peer {
  uint32_t rank = 0;
  std::shared_ptr<client::ParamSet> set;
  std::unique_ptr<client::AsyncPushes> pushes;
  std::vector<float> table = std::vector<float>(kQueueRows * kQueueDim);
  std::vector<float> dense = std::vector<float>(6);
  std::atomic<bool> interrupt{false};
  std::unique_ptr<client::Client> client;  // first to go
};

struct Plan {
  transport::FaultPlan faults;
  client::QueueOptions queue{2, 2, {false}, 1};
  uint64_t max_staleness = wire::kAnyStaleness;
  uint64_t last_cap_bytes = 0;  // what pushes may hold on the last server
  uint64_t round_deadline_ms = 20000;
  bool elastic = false;
  uint64_t grace_ms = 20000;
};

class Run {
 public:
  Run(uint32_t trainer_count, uint32_t server_count, const Plan& plan = {})
      : plan_(plan), network_(transport::InprocNetwork::create(plan.faults)), peers(trainer_count) {
    server::ServerOptions options;
    options.run_id = 7;
    options.server_count = server_count;
    options.trainer_count = trainer_count;
    options.reconnect_grace_ms = plan.grace_ms;
    options.elastic = plan.elastic;
    options.rejoin_ms = 600000;
    describe(server_count);
    for (uint32_t s = 0; s < server_count; ++s) {
      options.shard_id = s;
      options.memory_cap_bytes = 0;
      if (plan.last_cap_bytes != 0 && s + 1 == server_count) {
        options.memory_cap_bytes =
            plan.last_cap_bytes +
            planned_bytes(table::make_store(layout, s, server_count, nullptr, nullptr));
      }
      servers.push_back(std::make_unique<server::Server>(options));
      gates.push_back(std::make_unique<Gate>(*servers[s]));
      listeners_.push_back(network_->listen("server" + std::to_string(s), gates[s].get()));
      addresses_.push_back(listeners_[s]->addresses());
    }
    std::vector<std::function<void()>> starts;
    for (uint32_t rank = 0; rank < trainer_count; ++rank) {
      peers[rank].rank = rank;
      starts.push_back([this, rank] { start(peers[rank]); });
    }
    run_all(starts);
  }
  ~Run() {
    for (const auto& gate : gates) gate->set(true);
    for (Peer& peer : peers) peer.client.reset();
    for (const auto& server : servers) server->stop();
    for (const auto& listener : listeners_) listener->stop();
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // A client of trainer `rank` that is not connected yet.
  std::unique_ptr<client::Client> make_client(uint32_t rank, uint32_t incarnation,
                                              std::atomic<bool>* interrupt = nullptr) {
    client::ClientOptions options;
    options.rpc_retries = 1000;  // plans cut links far more often than any network
    options.run_id = 7;
    options.incarnation = incarnation;
    options.trainer_rank = rank;
    options.trainer_count = static_cast<uint32_t>(peers.size());
    options.reconnect_grace_ms = 20000;
    options.probe_ms = options.resend_ms = 10;
    options.round_deadline_ms = plan_.round_deadline_ms;
    options.servers = addresses_;
    if (interrupt) options.interrupted = [=] { return interrupt->exchange(false); };
    return std::make_unique<client::Client>(options, [this](transport::ConnectionHandler* handler) {
      return make_connector(network_->connector(handler), nullptr);
    });
  }
  transport::FaultCounts faults() const { return network_->counts(); }
  // Adds one to the expectation of every key and dense value that it has a gradient for.
  void step(Peer& peer, int64_t number) {
    const std::vector<int64_t> keys{number % kQueueRows, (number * 5 + peer.rank) % kQueueRows};
    peer.set->pull(0, keys.data(), keys.size(), false);
    const std::vector<float> rows(keys.size() * kQueueDim, 1.0f);
    const std::vector<float> dense(6, 2.0f);
    client::StepPush push;
    push.samples = 1;
    push.configs = layout.configs;
    push.parameters = {{0, dense.data()}};
    push.tables = {{0, keys.data(), keys.size(), rows.data()}};
    push.weights = {peer.dense.data()};
    for (const int64_t key : keys) ++pushed[static_cast<size_t>(key)];
    ++steps;
    peer.pushes->enqueue(push);
  }
  // Initial values less the sum of all gradients.
  void check_exactly_once(Peer& reader) {
    std::vector<void*> weights{reader.dense.data()};
    reader.set->leave();
    reader.set->pull_dense(weights);
    reader.set->pull_all_rows();
    for (const float value : reader.dense) CHECK_EQ(value, -2.0f * static_cast<float>(steps));
    for (size_t i = 0; i < reader.table.size(); ++i) {
      CHECK_EQ(reader.table[i], -static_cast<float>(pushed[i / kQueueDim]));
    }
  }

 private:
  void describe(uint32_t server_count) {
    cpudist::kernels::OptimizerConfig sgd;
    sgd.lr = 1.0;
    layout.mode = wire::UpdateMode::kOnArrival;
    layout.max_staleness = plan_.max_staleness;
    layout.configs = {sgd};
    layout.tables = {wire::TableSpec{"t", kQueueRows, kQueueDim, 0}};
    layout.blocks = {wire::BlockSpec{"d0", 4, wire::DType::kFloat32, 0, 0, 0, 0, 1},
                     wire::BlockSpec{"d1", 2, wire::DType::kFloat32, server_count - 1, 0, 0, 4, 1}};
  }
  void start(Peer& peer) {
    peer.client = make_client(peer.rank, 1, &peer.interrupt);
    client::Client& client = *peer.client;
    client.connect();
    peer.set = client.open(layout);
    if (peer.rank == 0) {
      std::vector<int64_t> keys(kQueueRows);
      std::iota(keys.begin(), keys.end(), 0);
      peer.set->store_table(0, keys, peer.table.data(), nullptr, nullptr, 0);
      peer.set->store_parameter(0, peer.dense.data(), nullptr, 0);
    }
    peer.set->ready();
    peer.set->bind_table(0, peer.table.data());
    peer.pushes = std::make_unique<client::AsyncPushes>(peer.set, plan_.queue);
    std::vector<void*> weights{peer.dense.data()};
    peer.set->pull_dense(weights);
  }

  const Plan plan_;
  std::shared_ptr<transport::InprocNetwork> network_;
  std::vector<std::unique_ptr<transport::Listener>> listeners_;
  std::vector<std::vector<std::string>> addresses_;

 public:
  wire::ParamSetLayout layout;
  std::vector<std::unique_ptr<server::Server>> servers;
  std::vector<std::unique_ptr<Gate>> gates;
  std::vector<Peer> peers;
  std::array<std::atomic<uint32_t>, kQueueRows> pushed{};
  std::atomic<uint32_t> steps{0};
};

void await(const std::function<bool()>& done) {
  const auto deadline = Clock::now() + kPatience;
  while (!done()) {
    CHECK(Clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

ErrorCode code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  cpudist::testing::fail(__FILE__, __LINE__, "nothing was thrown");
}

TEST(client_queue_waits_for_room_and_merges_what_waited) {
  Plan plan;
  plan.queue = {2, 4, {false}, 1};
  Run run(1, 1, plan);
  Peer& peer = run.peers[0];
  run.gates[0]->set(false);
  run.step(peer, 0);
  await([&] { return run.gates[0]->pushes == 1; });
  run.step(peer, 1);
  run.step(peer, 2);  // the queue is full
  peer.interrupt = true;
  CHECK_EQ(code_of([&] { run.step(peer, 3); }), ErrorCode::kInterrupted);  // queued all the same
  peer.interrupt = true;
  CHECK_EQ(code_of([&] { peer.set->drain(); }), ErrorCode::kInterrupted);
  run.gates[0]->set(true);
  peer.set->drain();
  CHECK_EQ(run.gates[0]->pushes, 2);
  const client::StalenessStats stats = peer.client->stats().staleness;
  CHECK_EQ(stats.pushes, 4);
  CHECK_EQ(stats.merged, 2);
  CHECK_EQ(run.servers[0]->stats().rounds, 2);
  run.check_exactly_once(peer);
}

TEST(client_queue_keeps_the_order_and_the_learning_rate_of_each_step) {
  Plan plan;
  plan.queue = {8, 8, {false}, 1};
  Run run(1, 1, plan);
  Peer& peer = run.peers[0];
  run.gates[0]->set(false);
  run.step(peer, 0);
  await([&] { return run.gates[0]->pushes == 1; });
  run.step(peer, 1);
  run.layout.configs[0].lr = 2.0;
  run.step(peer, 2);
  run.layout.configs[0].lr = 1.0;
  run.step(peer, 3);
  run.gates[0]->set(true);
  peer.set->drain();
  CHECK_EQ(run.gates[0]->pushes, 4);  // of different rates: never one update
  std::vector<void*> weights{peer.dense.data()};
  peer.set->pull_dense(weights);
  CHECK_EQ(peer.dense[0], -2.0f * 5.0f);
}

TEST(client_queue_timeout_leaves_the_push_queued) {
  Plan plan;
  plan.round_deadline_ms = 200;
  plan.queue = {1, 1, {false}, 1};
  Run run(1, 1, plan);
  Peer& peer = run.peers[0];
  run.gates[0]->set(false);
  run.step(peer, 0);
  await([&] { return run.gates[0]->pushes == 1; });
  run.step(peer, 1);
  CHECK_EQ(code_of([&] { run.step(peer, 2); }), ErrorCode::kTimeout);
  run.gates[0]->set(true);
  peer.set->drain();
  run.check_exactly_once(peer);
}

TEST(client_queue_failure_is_thrown_by_every_later_call) {
  Run run(1, 2);
  Peer& peer = run.peers[0];
  run.step(peer, 0);
  peer.set->drain();
  run.gates[1]->set(false);
  run.step(peer, 1);
  await([&] { return run.gates[1]->pushes == 2; });
  run.servers[1]->stop("the test ends it");
  run.gates[1]->set(true);
  CHECK_EQ(code_of([&] { peer.set->drain(); }), ErrorCode::kPeerLost);
  CHECK_EQ(code_of([&] { peer.set->drain(); }), ErrorCode::kPeerLost);
  CHECK_EQ(code_of([&] { peer.set->leave(); }), ErrorCode::kPeerLost);
}

// Of who was counted as lost, and goes on as another incarnation: a push that only one server has
// applied, and those behind it, are known.
TEST(client_queue_says_what_came_of_its_steps_when_its_trainer_was_replaced) {
  for (const bool all : {false, true}) {
    Plan plan;
    plan.queue = {4, 2, {false}, 1};
    plan.elastic = true;
    Run run(1, 2, plan);
    Peer& peer = run.peers[0];
    run.step(peer, 0);
    peer.set->drain();
    run.gates[0]->set(false);  // server 1 is sent to first
    run.step(peer, 1);
    await([&] { return run.gates[0]->pushes == 2; });
    CHECK_EQ(run.servers[1]->stats().rounds, 2);
    run.step(peer, 2);
    run.step(peer, 3);
    CHECK_EQ(peer.pushes->added(), 4);
    peer.client->abort("it is counted as lost");
    run.gates[0]->open_to_nobody();
    const auto newer = run.make_client(0, 2);
    newer->connect();
    std::vector<uint64_t> told = newer->carried_out_before();
    if (all) ++told[0];  // as if its answer alone had been lost
    for (int twice = 0; twice < 2; ++twice) {
      const client::Unapplied found = peer.pushes->end(told);
      CHECK_EQ(found.steps, all ? 2 : 3);
      CHECK_EQ(found.torn, all ? 0 : 1);
    }
    CHECK_EQ(run.servers[0]->stats().rounds, 1);
    CHECK_EQ(run.servers[1]->stats().rounds, 2);
  }
}

TEST(client_queue_that_is_answered_has_lost_nothing) {
  Plan plan;
  plan.elastic = true;
  Run run(1, 2, plan);
  Peer& peer = run.peers[0];
  for (int64_t i = 0; i < 5; ++i) run.step(peer, i);
  peer.set->drain();
  const auto newer = run.make_client(0, 2);
  newer->connect();
  peer.client->abort("it is counted as lost");
  const client::Unapplied found = peer.pushes->end(newer->carried_out_before());
  CHECK_EQ(found.steps, 0);
  CHECK_EQ(found.torn, 0);
}

TEST(client_knows_that_it_was_counted_as_lost) {
  Plan plan;
  plan.elastic = true;
  plan.grace_ms = 30;
  Run run(1, 2, plan);
  CHECK(!run.peers[0].client->counted_lost());
  run.peers[0].client.reset();  // without a goodbye
  await([&] { return run.servers[0]->stats().lost == 1 && run.servers[1]->stats().lost == 1; });
  const auto same = run.make_client(0, 1);
  CHECK_EQ(code_of([&] { same->connect(); }), ErrorCode::kCountedLost);
  CHECK(same->counted_lost());
  const auto newer = run.make_client(0, 2);
  newer->connect();
  CHECK(!newer->counted_lost());
  const auto fenced = run.make_client(0, 1);
  CHECK_EQ(code_of([&] { fenced->connect(); }), ErrorCode::kFenced);
  CHECK(!fenced->counted_lost());
}

TEST(client_queue_stops_under_a_thread_that_waits_for_room) {
  Plan plan;
  plan.queue = {1, 1, {false}, 1};
  Run run(2, 1, plan);
  Peer& peer = run.peers[0];
  run.gates[0]->set(false);
  run.step(peer, 0);
  await([&] { return run.gates[0]->pushes == 1; });
  run.step(peer, 1);
  std::atomic<bool> waits{false};
  ErrorCode code = ErrorCode::kInternal;
  std::thread waiting([&] {
    waits = true;
    code = code_of([&] { run.step(peer, 2); });
  });
  await([&] { return waits.load(); });
  peer.client->abort("the test ends it");
  run.gates[0]->set(true);
  waiting.join();
  CHECK_EQ(code, ErrorCode::kClosed);
}

TEST(client_queue_close_under_a_thread_that_steps_ends) {
  for (int attempt = 0; attempt < 20; ++attempt) {
    Run run(1, 1);
    Peer& peer = run.peers[0];
    std::atomic<int> done{0};
    std::thread stepping([&] {
      try {
        for (int64_t number = 0;; ++number) {
          run.step(peer, number);
          ++done;
        }
      } catch (const Error&) {
        // The set is closed, or a push came after it was.
      }
    });
    await([&] { return done >= 3; });
    try {
      peer.set->close();
    } catch (const Error&) {
      // A push that was queued behind the drain failed before the close.
    }
    stepping.join();
  }
}

TEST(client_queue_ends_with_a_close_that_was_interrupted) {
  for (const bool other_call : {false, true}) {
    Plan plan;
    plan.faults.delay = 1;  // frames come in a thread of the network
    Run run(1, 1, plan);
    Peer& peer = run.peers[0];
    run.step(peer, 0);
    peer.set->drain();
    run.gates[0]->hold(wire::FrameKind::kClose);
    peer.interrupt = true;
    CHECK_EQ(code_of([&] { peer.set->close(); }), ErrorCode::kInterrupted);
    CHECK(peer.set->has_background());
    run.gates[0]->set(true);
    if (other_call) peer.client->barrier();  // which ends what was interrupted
    peer.set->close();
    CHECK(!peer.set->has_background());
    CHECK_EQ(peer.set->state()->table(0).memory_bytes(), 0u);
    CHECK_EQ(code_of([&] { peer.set->close(); }), ErrorCode::kClosed);
    CHECK_EQ(code_of([&] { run.step(peer, 1); }), ErrorCode::kClosed);
  }
}

TEST(client_queue_two_threads_close_two_sets_at_once) {
  for (int attempt = 0; attempt < 20; ++attempt) {
    Run run(1, 1);
    Peer& peer = run.peers[0];
    const auto second = peer.client->open(run.layout);
    const client::AsyncPushes pushes(second, client::QueueOptions{2, 2, {false}, 1});
    run.step(peer, 0);
    run_all({[&] { peer.set->close(); }, [&] { second->close(); }});
    CHECK(!peer.set->has_background() && !second->has_background());
    CHECK_EQ(peer.client->stats().staleness.pushes, 1u);
  }
}

TEST(client_queue_sends_again_what_one_server_has_no_memory_for) {
  // The last server may hold one push; the one of trainer 0 waits there for trainer 2.
  Plan plan;
  plan.queue = {1, 1, {false}, 1};
  plan.max_staleness = 2;
  plan.last_cap_bytes = 700;
  Run run(3, 2, plan);
  std::vector<std::function<void()>> calls;
  for (Peer& peer : run.peers) {
    calls.push_back([&] {
      for (int64_t number = 0; number < 20; ++number) run.step(peer, number);
      peer.set->drain();
      peer.set->leave();
    });
  }
  run_all(calls);
  for (Peer& peer : run.peers) CHECK(peer.client->stats().staleness.steps_max <= 2);
  run.check_exactly_once(run.peers[0]);
}

TEST(client_queue_applies_every_gradient_once_under_faults) {
  Plan plan;
  plan.faults.drop = 0.2;
  plan.faults.duplicate = 0.2;
  plan.faults.reorder = 0.2;
  plan.faults.cut = 0.02;
  plan.faults.seed = 5;
  Run run(3, 2, plan);
  std::vector<std::function<void()>> calls;
  for (Peer& peer : run.peers) {
    calls.push_back([&] {
      // They finish one after the other.
      const int64_t count = 15 + 10 * static_cast<int64_t>(peer.rank);
      for (int64_t number = 0; number < count; ++number) run.step(peer, number);
      peer.set->drain();
    });
  }
  run_all(calls);
  run.check_exactly_once(run.peers[1]);
  const transport::FaultCounts counts = run.faults();
  CHECK(counts.dropped > 0 && counts.duplicated > 0 && counts.reordered > 0 && counts.cut > 0);
  uint64_t measured = 0;
  for (Peer& peer : run.peers) measured += peer.client->stats().staleness.pushes;
  CHECK_EQ(measured, run.steps.load());
}

}  // namespace
