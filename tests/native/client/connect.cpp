// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A client whose servers end before it has reached them, are frozen, or have a stranger in their
// place.

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/errors.h"
#include "client/client.h"
#include "support/check.h"
#include "support/failing_new.h"
#include "support/scripted_links.h"

namespace {

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

// To a rank that has said goodbye.
class EndedRank final : public transport::Connector {
 public:
  std::shared_ptr<transport::Connection> connect(const std::string& address,
                                                 TimePoint /*deadline*/) override {
    throw Error(ErrorCode::kClosed, address + ": that rank has ended its part");
  }
  void stop() override {}
};

TEST(client_whose_server_ended_before_the_first_hello_waits_the_grace_only) {
  client::ClientOptions options;
  options.servers = {{"rank:0"}};
  options.reconnect_grace_ms = 100;
  options.connect_deadline_ms = 30000;
  const TimePoint begun = Clock::now();
  client::Client client(
      options, [](transport::ConnectionHandler*) { return std::make_shared<EndedRank>(); });
  try {
    client.connect();
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kPeerLost);
    CHECK(std::string(error.what()).find("has ended its part") != std::string::npos);
  }
  const auto taken = Clock::now() - begun;
  CHECK(taken >= std::chrono::milliseconds(100));
  CHECK(taken < std::chrono::seconds(10));
}

// Whatever the thread that keeps the links finds no memory for, it does at its next look.
TEST(client_whose_links_thread_is_out_of_memory_goes_on) {
  at_every_allocation([](int64_t nth) {
    client::ClientOptions options;
    options.servers = {{"rank:0"}};
    options.reconnect_grace_ms = 1;
    options.connect_deadline_ms = 30000;
    client::Client client(
        options, [](transport::ConnectionHandler*) { return std::make_shared<EndedRank>(); });
    const FailingNewElsewhere failing(nth, 3);
    try {
      client.connect();
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kPeerLost);
      CHECK(std::string(error.what()).find("was lost") != std::string::npos);
    }
    return failing.happened();
  });
}

using std::chrono::milliseconds;
using Link = std::shared_ptr<Answering>;

// A client of so many servers, to which a test makes the links.
struct Linked {
  using Attempt = std::function<Link(const std::string& address, uint32_t nth)>;

  explicit Linked(uint32_t servers, Attempt attempt_)
      : attempt(std::move(attempt_)), opened(servers) {
    options.run_id = 7;
    options.trainer_count = 1;
    options.reconnect_grace_ms = 60000;
    options.liveness_ms = 250;  // nobody is silent here, and a heartbeat is due every 50 ms
    for (uint32_t server = 0; server < servers; ++server) {
      options.servers.push_back({"test:" + std::to_string(server)});
    }
  }
  Link answering(const std::string& address, uint32_t trainers = 1) {
    wire::Hello hello;
    hello.trainer_count = trainers;
    hello.server_count = static_cast<uint32_t>(options.servers.size());
    return std::make_shared<Answering>(handler, address, hello);
  }
  std::unique_ptr<client::Client> make() {
    return std::make_unique<client::Client>(
        options, [this](transport::ConnectionHandler* made_for) {
          handler = made_for;
          connector = std::make_shared<Scripted>([this](const std::string& address) {
            const Link link = attempt(address, attempts++);
            const std::lock_guard lock(mutex);
            return opened.at(std::stoul(address.substr(5))) = link;
          });
          return connector;
        });
  }
  Link link(uint32_t server) {
    const std::lock_guard lock(mutex);
    return opened.at(server);
  }

  const Attempt attempt;
  client::ClientOptions options;
  transport::ConnectionHandler* handler = nullptr;
  std::shared_ptr<Scripted> connector;
  std::atomic<uint32_t> attempts{0};
  std::mutex mutex;
  std::vector<Link> opened;  // by server
};

[[noreturn]] void refuse_key() { throw Error(ErrorCode::kAuthentication, "wrong key of a test"); }

// Each attempt takes longer than a heartbeat may: there is one in between.
TEST(client_beats_between_attempts_at_servers_that_are_frozen) {
  std::atomic<bool> frozen{false};
  std::mutex mutex;
  std::vector<uint64_t> beats;  // at the good server, by attempt
  Linked linked(4, [&](const std::string& address, uint32_t) {
    if (!frozen) return linked.answering(address);
    {
      const std::lock_guard lock(mutex);
      beats.push_back(linked.link(0)->beats());
    }
    let_pass(milliseconds(60));
    throw Error(ErrorCode::kAddress, "no answer within the deadline");
  });
  const auto client = linked.make();
  client->connect();
  frozen = true;
  for (uint32_t server = 1; server < 4; ++server) linked.link(server)->close("test");
  const auto count = [&] {
    const std::lock_guard lock(mutex);
    return beats.size();
  };
  CHECK(comes_true([&] { return count() >= 9; }));
  const std::lock_guard lock(mutex);
  for (size_t i = 1; i < beats.size(); ++i) CHECK(beats[i] > beats[i - 1]);
}

TEST(client_that_ends_does_not_wait_for_an_attempt) {
  std::atomic<bool> at_it{false};
  std::atomic<bool> ended{false};
  Linked linked(1, [&](const std::string& address, uint32_t nth) {
    if (nth == 0) return linked.answering(address);
    at_it = true;
    ended = comes_true([&] { return linked.connector->stopped.load(); });
    throw Error(ErrorCode::kAddress, "the connector stopped");
  });
  auto client = linked.make();
  client->connect();
  linked.link(0)->close("test");
  CHECK(comes_true([&] { return at_it.load(); }));
  client.reset();
  CHECK(ended);
}

// Whoever has a server's port for a while ends no trainer that was with the server before, whether
// it is asked for a key or asks for one.
TEST(client_that_was_open_outlives_a_stranger_at_the_port) {
  Linked linked(1, [&](const std::string& address, uint32_t nth) {
    const Link link = linked.answering(address);
    if (nth == 1 || nth == 2) refuse_key();
    if (nth == 3) link->refuse_with(Error(ErrorCode::kAuthentication, "no key here"));
    return link;
  });
  const auto client = linked.make();
  client->connect();
  linked.link(0)->close("test");
  CHECK(comes_true([&] { return client->stats().reconnects == 1; }));
  client->check();
  CHECK(linked.attempts >= 5);
}

TEST(client_that_was_never_open_is_told_of_the_key_at_once) {
  Linked linked(1, [](const std::string&, uint32_t nth) -> Link {
    if (nth == 0) refuse_key();
    throw Error(ErrorCode::kAddress, "nobody listens there");
  });
  linked.options.servers = {{"test:0", "test:0"}};
  const auto client = linked.make();
  CHECK_EQ(error_code([&] { client->connect(); }), code(ErrorCode::kAuthentication));
  CHECK_EQ(linked.attempts.load(), 1u);
}

std::string failure_of(client::Client& client, ErrorCode wanted) {
  std::string text;
  CHECK(comes_true([&] {
    try {
      client.check();
    } catch (const Error& error) {
      CHECK_EQ(code(error.code()), code(wanted));
      text = error.what();
    }
    return !text.empty();
  }));
  return text;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// It is the loss of that server, which others may come in the place of.
TEST(client_that_was_open_loses_a_server_whose_place_another_has_taken) {
  for (const ErrorCode refusal : {ErrorCode::kProtocol, ErrorCode::kConfigMismatch}) {
    Linked linked(1, [&](const std::string& address, uint32_t nth) {
      const Link link = linked.answering(address);
      if (nth > 0) link->refuse_with(Error(refusal, "hello of another run"));
      return link;
    });
    const auto client = linked.make();
    client->connect();
    linked.link(0)->close("test");
    const std::string text = failure_of(*client, ErrorCode::kPeerLost);
    CHECK(has(text, "server 0 (test:0) was lost: another server has taken its place at test:0"));
    CHECK(has(text, "hello of another run"));
    CHECK_EQ(linked.attempts.load(), 2u);
    CHECK(!client->counted_lost());
  }
}

TEST(client_that_was_open_loses_a_server_to_one_of_another_layout) {
  Linked linked(1, [&](const std::string& address, uint32_t nth) {
    return linked.answering(address, nth == 0 ? 1 : 2);
  });
  const auto client = linked.make();
  client->connect();
  linked.link(0)->close("test");
  const std::string text = failure_of(*client, ErrorCode::kPeerLost);
  CHECK(has(text, "another server has taken its place at test:0: it is shard 0 of 1 for 2"));
}

TEST(client_that_was_never_open_is_told_what_is_there) {
  for (const ErrorCode refusal : {ErrorCode::kProtocol, ErrorCode::kConfigMismatch}) {
    Linked linked(1, [&](const std::string& address, uint32_t) {
      const Link link = linked.answering(address);
      link->refuse_with(Error(refusal, "hello of another run"));
      return link;
    });
    CHECK_EQ(error_code([&] { linked.make()->connect(); }), code(refusal));
  }
  Linked other(1,
               [&](const std::string& address, uint32_t) { return other.answering(address, 2); });
  CHECK_EQ(error_code([&] { other.make()->connect(); }), code(ErrorCode::kConfigMismatch));
}

}  // namespace
