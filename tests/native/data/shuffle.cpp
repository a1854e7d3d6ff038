// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Records that trainers give to each other: each arrives once, in the order of its source, over
// links that lose, repeat, reorder and break; and what is said when a trainer is gone.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <span>

#include "data/shuffle/exchange.h"
#include "support/channel_fixture.h"
#include "support/check.h"
#include "support/handshake_fixture.h"
#include "support/messages_fixture.h"
#include "support/run_all.h"
#include "transport/inproc/channel.h"
#include "transport/tcp/channel.h"
#include "wire/control.h"
#include "wire/frame.h"

using namespace cpudist::testing;  // NOLINT
using namespace cpudist::data;     // NOLINT
using namespace cpudist;           // NOLINT

namespace {

Schema lists() {
  Schema schema;
  schema.slots.resize(2);
  schema.slots[0].name = "ids";
  schema.slots[1].name = "x";
  schema.slots[1].kind = SlotKind::kFloat;
  schema.slots[1].dim = 1;
  return schema;
}

// A record of lists() with `ids` values; the first says which record of which trainer it is.
std::vector<uint64_t> make_record(uint64_t number, size_t ids) {
  std::vector<uint64_t> record(kRecordHeaderWords + 1 + ids + 1, number);
  record[0] = record_header(record.size(), 1 + ids);
  record[1] = 0;
  record[2] = ids;
  record.back() = 0x3f800000;
  return record;
}

using Words = std::vector<uint64_t>;

struct Trainer {
  Trainer(uint32_t number, uint32_t trainers, ShuffleOptions options = {})
      : rank(number),
        received(trainers),
        exchange(lists(), filled(options, number, trainers), sink()) {}

  static ShuffleOptions filled(ShuffleOptions options, uint32_t rank, uint32_t trainers) {
    options.rank = rank;
    options.trainers = trainers;
    options.run_id = 99;
    options.host = "host-" + std::to_string(rank);
    options.resend_ms = 20;
    if (options.liveness_ms == 5000) options.liveness_ms = 10000;
    return options;
  }
  ShuffleSink sink() {
    return [this](uint32_t source, std::span<const uint64_t> words, size_t) {
      received[source].insert(received[source].end(), words.begin(), words.end());
    };
  }
  // Gives `records` records away by destination() and finishes.
  ShuffleTotals shuffle(size_t records, size_t ids) {
    const auto trainers = static_cast<uint32_t>(received.size());
    for (size_t i = 0; i < records; ++i) {
      const uint64_t number = rank * 1'000'000 + i;
      exchange.send(destination(7, number, trainers), make_record(number, 1 + (i % ids)));
    }
    return exchange.finish();
  }

  uint32_t rank;
  std::vector<Words> received;
  ShuffleExchange exchange;
};

struct World {
  explicit World(uint32_t size, const ShuffleOptions& options = {}) {
    for (uint32_t rank = 0; rank < size; ++rank) {
      trainers.push_back(std::make_unique<Trainer>(rank, size, options));
    }
    listeners.resize(size);
    connectors.resize(size);
    addresses.resize(size);
  }
  // `key`: of all of them; empty: none.
  void listen(const std::shared_ptr<transport::InprocNetwork>& network,
              const std::string& key = {}) {
    for (auto& trainer : trainers) {
      const uint32_t rank = trainer->rank;
      const auto credentials = key.empty() ? nullptr : credentials_of(*trainer, key);
      transport::ConnectionHandler* handler = trainer->exchange.handler();
      listeners[rank] = network->listen("t" + std::to_string(rank), handler, credentials);
      connectors[rank] = network->connector(handler, credentials);
    }
    learn();
  }
  // `keys`: of each trainer; none: without.
  void listen_tcp(bool unix_socket, const std::vector<std::string>& keys = {}) {
    transport::ListenOptions options;
    options.unix_socket = unix_socket;
    for (auto& trainer : trainers) {
      transport::ConnectionHandler* handler = trainer->exchange.handler();
      options.credentials = keys.empty() ? nullptr : credentials_of(*trainer, keys[trainer->rank]);
      listeners[trainer->rank] = transport::listen_tcp(options, handler);
      connectors[trainer->rank] =
          transport::make_tcp_connector(handler, options.limits, options.credentials);
    }
    learn();
  }
  static std::shared_ptr<const wire::Credentials> credentials_of(const Trainer& trainer,
                                                                 const std::string& key) {
    wire::Identity own;
    own.run_id = 99;
    own.rank = static_cast<uint16_t>(trainer.rank);
    return wire::make_credentials(key, own, wire::Purpose::kShuffle);
  }
  void learn() {
    for (auto& trainer : trainers) {
      addresses[trainer->rank] = listeners[trainer->rank]->addresses();
    }
  }
  void connect(uint32_t rank) {
    trainers[rank]->exchange.connect(addresses, std::move(listeners[rank]), connectors[rank]);
  }
  // Runs every trainer in a thread of its own and checks that every record arrived once.
  void shuffle(size_t records, size_t ids) {
    std::vector<ShuffleTotals> found(trainers.size());
    std::vector<std::function<void()>> calls;
    for (auto& trainer : trainers) {
      calls.push_back([&, t = trainer.get()] {
        connect(t->rank);
        found[t->rank] = t->shuffle(records, ids);
        t->exchange.close();
      });
    }
    run_all(calls);
    ShuffleTotals sent;
    ShuffleTotals received;
    for (auto& trainer : trainers) {
      sent.add(trainer->exchange.sent());
      received.add(found[trainer->rank]);
    }
    CHECK(sent == received);
    CHECK_EQ(sent.records, trainers.size() * records);
    check_all(records, ids);
  }
  void check_all(size_t records, size_t ids) const {
    const auto size = static_cast<uint32_t>(trainers.size());
    std::vector<std::vector<Words>> expected(size, std::vector<Words>(size));
    for (uint32_t from = 0; from < size; ++from) {
      for (size_t i = 0; i < records; ++i) {
        const uint64_t number = from * 1'000'000 + i;
        const Words record = make_record(number, 1 + (i % ids));
        Words& to = expected[destination(7, number, size)][from];
        to.insert(to.end(), record.begin(), record.end());
      }
    }
    for (const auto& trainer : trainers) CHECK(trainer->received == expected[trainer->rank]);
  }

  std::vector<std::unique_ptr<Trainer>> trainers;
  std::vector<std::unique_ptr<transport::Listener>> listeners;
  std::vector<std::shared_ptr<transport::Connector>> connectors;
  std::vector<std::vector<std::string>> addresses;
};

// What `body` throws, as text; its code must be the expected one.
template <typename Body>
std::string refusal(ErrorCode expected, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (error.code() != expected) fail(__FILE__, __LINE__, std::string("found ") + error.what());
    return error.what();
  }
  fail(__FILE__, __LINE__, "nothing was thrown");
}

void check_says(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) fail(__FILE__, __LINE__, text + ": no " + part);
}

}  // namespace

TEST(data_shuffle_destinations_are_uniform_and_stay) {
  for (const uint32_t trainers : {1u, 2u, 3u, 7u, 50u}) {
    std::vector<double> seen(trainers);
    const size_t keys = 2000 * trainers;
    for (uint64_t key = 0; key < keys; ++key) ++seen[destination(5, key, trainers)];
    double chi = 0;
    for (const double count : seen) chi += (count - 2000) * (count - 2000) / 2000;
    // Mean trainers - 1, variance twice that: seven standard deviations.
    CHECK(chi <= trainers - 1 + 7 * std::sqrt(2.0 * trainers));
  }
  size_t moved = 0;
  for (uint64_t key = 0; key < 1000; ++key) {
    CHECK_EQ(destination(5, key, 3), destination(5, key, 3));
    moved += destination(5, key, 3) != destination(6, key, 3);
  }
  CHECK(moved > 550 && moved < 780);
}

TEST(data_shuffle_of_one_trainer_keeps_all) {
  World world(1);
  world.trainers[0]->exchange.connect({}, nullptr, nullptr);
  const ShuffleTotals all = world.trainers[0]->shuffle(100, 5);
  CHECK_EQ(all.records, 100u);
  world.check_all(100, 5);
}

TEST(data_shuffle_in_process) {
  for (const uint32_t size : {2u, 3u}) {
    World world(size);
    world.listen(transport::InprocNetwork::create());
    world.shuffle(3000, 300);
  }
}

TEST(data_shuffle_of_nothing_ends) {
  World world(3);
  world.listen(transport::InprocNetwork::create());
  world.shuffle(0, 1);
}

TEST(data_shuffle_over_sockets) {
  for (const bool unix_socket : {true, false}) {
    World world(3);
    world.listen_tcp(unix_socket);
    world.shuffle(3000, 300);
  }
}

TEST(data_shuffle_among_trainers_with_a_key) {
  for (const bool unix_socket : {true, false}) {
    World world(3);
    world.listen_tcp(unix_socket, std::vector<std::string>(3, std::string(32, 'k')));
    world.shuffle(3000, 300);
  }
}

TEST(data_shuffle_with_another_key_is_refused) {
  World world(2);
  world.listen_tcp(false, {std::string(32, 'k'), std::string(32, 'K')});
  std::vector<uint32_t> found(2);
  run_all({[&] { found[0] = error_code([&] { world.connect(0); }); },
           [&] { found[1] = error_code([&] { world.connect(1); }); }});
  // Whoever is first finds it; the other one finds the same, or that the first has given up.
  CHECK(found[0] == code(ErrorCode::kAuthentication) ||
        found[1] == code(ErrorCode::kAuthentication));
  CHECK(found[0] != 0 && found[1] != 0);
}

TEST(data_shuffle_records_larger_than_a_frame) {
  World world(2);
  world.listen_tcp(false);
  world.shuffle(20, 200'000);
}

TEST(data_shuffle_is_exact_over_links_that_lose_frames) {
  transport::FaultPlan plan;
  plan.drop = 0.1;
  plan.duplicate = 0.1;
  plan.reorder = 0.1;
  plan.delay = 0.1;
  plan.delay_ms_max = 3;
  plan.seed = 5;
  transport::FaultCounts seen;
  for (const std::string& key : {std::string(), kSecret}) {
    // A run has some hundred frames: a kind of fault may be missing from one.
    for (int run = 0; run < 2; ++run) {
      const auto network = transport::InprocNetwork::create(plan);
      World world(3);
      world.listen(network, key);
      world.shuffle(6000, 600);
      const transport::FaultCounts counts = network->counts();
      seen.dropped += counts.dropped;
      seen.duplicated += counts.duplicated;
      seen.reordered += counts.reordered;
    }
    ++plan.seed;
  }
  CHECK(seen.dropped > 0 && seen.duplicated > 0 && seen.reordered > 0);
}

TEST(data_shuffle_is_exact_over_links_that_break) {
  transport::FaultPlan plan;
  plan.cut = 0.1;
  plan.drop = 0.05;
  plan.seed = 6;
  for (const std::string& key : {std::string(), kSecret}) {
    const auto network = transport::InprocNetwork::create(plan);
    World world(2);
    world.listen(network, key);
    world.shuffle(6000, 600);
    CHECK(network->counts().cut > 0);
  }
}

TEST(data_shuffle_names_a_trainer_that_died) {
  ShuffleOptions options;
  options.liveness_ms = 400;
  World world(2, options);
  world.listen_tcp(false);
  run_all({[&] { world.connect(0); }, [&] { world.connect(1); }});
  const TimePoint began = Clock::now();
  std::string text;
  run_all(
      {[&] { text = refusal(ErrorCode::kPeerLost, [&] { world.trainers[0]->exchange.finish(); }); },
       [&] { world.trainers[1]->exchange.close(); }});
  check_says(text, "trainer 1 (host-1, ");
  CHECK(Clock::now() - began < kPatience);
  CHECK_THROWS(world.trainers[0]->exchange.finish(), Error);
}

// A peer that answers the hello and nothing else, as a stopped process whose sockets live on.
TEST(data_shuffle_names_a_trainer_that_froze) {
  ShuffleOptions options;
  options.liveness_ms = 300;
  World world(2, options);
  const auto network = transport::InprocNetwork::create();
  Recorder frozen;
  frozen.on_each = [](const Recorder::Peer& connection, wire::Frame& frame) {
    if (frame.header.kind != wire::FrameKind::kHello) return;
    wire::Hello hello;
    hello.trainer_count = 2;
    hello.shard_id = 1;
    hello.host = "host-1";
    wire::Frame reply;
    reply.header.kind = wire::FrameKind::kHello;
    reply.payload = wire::encode(hello);
    connection->send(std::move(reply));
  };
  const auto listener = network->listen("frozen", &frozen);
  transport::ConnectionHandler* handler = world.trainers[0]->exchange.handler();
  world.trainers[0]->exchange.connect({{}, listener->addresses()}, network->listen("t0", handler),
                                      network->connector(handler));
  const std::string text =
      refusal(ErrorCode::kPeerLost, [&] { world.trainers[0]->shuffle(10, 10); });
  check_says(text, "trainer 1 (host-1, inproc:frozen) was lost: silent for 300 ms");
  world.trainers[0]->exchange.close();
}

TEST(data_shuffle_waits_for_a_slow_trainer_to_a_deadline) {
  ShuffleOptions options;
  options.round_deadline_ms = 300;
  options.liveness_ms = 200;  // it lives: heartbeats are answered
  World world(2, options);
  world.listen(transport::InprocNetwork::create());
  run_all({[&] { world.connect(0); }, [&] { world.connect(1); }});
  const std::string text =
      refusal(ErrorCode::kTimeout, [&] { world.trainers[0]->exchange.finish(); });
  check_says(text, "trainer 1 (host-1, inproc:t1), which has not sent all of its records");
}

TEST(data_shuffle_is_interrupted_by_a_signal) {
  ShuffleOptions options;
  std::atomic<bool> signal{false};
  options.interrupted = [&] { return signal.load(); };
  World world(2, options);
  world.listen(transport::InprocNetwork::create());
  run_all({[&] { world.connect(0); }, [&] { world.connect(1); }});
  signal = true;
  refusal(ErrorCode::kInterrupted, [&] { world.trainers[0]->exchange.finish(); });
}

TEST(data_shuffle_refuses_records_of_other_slots) {
  World world(2);
  world.listen(transport::InprocNetwork::create());
  run_all({[&] { world.connect(0); }, [&] { world.connect(1); }});
  Words record = make_record(1, 3);
  record[2] = 2;  // a count that leaves an integer over
  world.trainers[0]->exchange.send(1, record);
  const std::string found =
      refusal(ErrorCode::kProtocol, [&] { world.trainers[0]->exchange.finish(); });
  check_says(found, "trainer 1 (host-1, inproc:t1) refuses: ");
  const std::string text =
      refusal(ErrorCode::kProtocol, [&] { world.trainers[1]->exchange.finish(); });
  check_says(text, "trainer 0 (host-0, inproc:t0) sent what is no shuffle of these slots");
}

TEST(data_shuffle_refuses_trainers_of_another_epoch) {
  World world(2);
  ShuffleOptions other;
  other.epoch = 4;
  world.trainers[1] = std::make_unique<Trainer>(1, 2, other);
  world.listen(transport::InprocNetwork::create());
  const std::string text = refusal(ErrorCode::kConfigMismatch, [&] { world.connect(0); });
  check_says(text, "the epoch of the shuffle of the hello is not that of trainer 1");
}
