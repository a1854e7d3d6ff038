// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A client whose servers end before it has reached them.

#include <memory>
#include <string>

#include "base/errors.h"
#include "client/client.h"
#include "support/check.h"
#include "support/failing_new.h"

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

}  // namespace
