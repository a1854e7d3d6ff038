// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Handshakes over in-process links with faults: each attempt ends, with a link on which frames
// travel or with an error that says why there is none.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "support/handshake_fixture.h"
#include "transport/inproc/channel.h"
#include "wire/control.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

constexpr uint64_t kKeyedShortMs = 100;
constexpr uint64_t kKeyedLongMs = std::chrono::milliseconds(kPatience).count();

struct KeyedLinks {
  explicit KeyedLinks(const transport::FaultPlan& plan, const std::string& clients_key = kSecret,
                      uint64_t handshake_deadline_ms = kKeyedLongMs)
      : network(transport::InprocNetwork::create(plan)),
        listener(network->listen("server", &server, with_key(a_server()))),
        connector(network->connector(
            &client, clients_key.empty() ? nullptr : with_key(a_trainer(), clients_key),
            handshake_deadline_ms)) {}
  ~KeyedLinks() {
    connector->stop();
    listener->stop();
  }
  std::shared_ptr<transport::Connection> connect() {
    return connector->connect("inproc:server", soon());
  }

  Recorder server;
  Recorder client;
  std::shared_ptr<transport::InprocNetwork> network;
  std::unique_ptr<transport::Listener> listener;
  std::shared_ptr<transport::Connector> connector;
};

// Sends hellos until one arrives, or the link is closed; whether one did.
bool greets_keyed(KeyedLinks& pair, const std::shared_ptr<transport::Connection>& connection) {
  const size_t before = pair.server.frame_count();
  const TimePoint deadline = soon();
  while (!connection->closed() && pair.server.frame_count() == before) {
    CHECK(Clock::now() < deadline);
    connection->send(make_frame(wire::FrameKind::kHello, 0, 0));
    let_pass(std::chrono::milliseconds(2));
  }
  return pair.server.frame_count() > before;
}

// Makes links until so many have been of use, and counts the others.
size_t reach_keyed(const transport::FaultPlan& plan, size_t links) {
  KeyedLinks pair(plan);
  size_t useless = 0;
  for (size_t useful = 0; useful < links;) {
    std::shared_ptr<transport::Connection> connection;
    try {
      connection = pair.connect();
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kAddress);
      CHECK_EQ(std::string(error.what()).find("inproc:server: cannot prove the key: "), 0u);
    }
    const bool used = connection && greets_keyed(pair, connection);
    ++(used ? useful : useless);
    CHECK(useless < 50 * links);
    if (connection) connection->close("done");
  }
  CHECK_EQ(pair.server.broken_promises() + pair.client.broken_promises(), std::string());
  return useless;
}

transport::FaultPlan keyed_plan(double transport::FaultPlan::* kind, double probability) {
  transport::FaultPlan plan;
  plan.*kind = probability;
  plan.delay_ms_max = 3;
  plan.seed = 3;
  return plan;
}

}  // namespace

TEST(inproc_keyed_links_are_made_whatever_is_lost) {
  reach_keyed(keyed_plan(&transport::FaultPlan::drop, 0.4), 20);
  CHECK(reach_keyed(keyed_plan(&transport::FaultPlan::cut, 0.3), 20) > 0);
  CHECK_EQ(reach_keyed(keyed_plan(&transport::FaultPlan::duplicate, 0.7), 20), 0u);
  CHECK_EQ(reach_keyed(keyed_plan(&transport::FaultPlan::delay, 0.7), 20), 0u);
  reach_keyed(keyed_plan(&transport::FaultPlan::reorder, 0.7), 20);
}

TEST(inproc_keyed_links_of_which_nothing_arrives_end_in_an_error) {
  KeyedLinks pair(keyed_plan(&transport::FaultPlan::drop, 1), kSecret, kKeyedShortMs);
  const TimePoint begun = Clock::now();
  CHECK_EQ(error_code([&] { pair.connect(); }), code(ErrorCode::kAddress));
  CHECK(Clock::now() - begun >= std::chrono::milliseconds(kKeyedShortMs));
}

TEST(inproc_keyed_handlers_hear_nothing_of_who_has_another_key) {
  const transport::FaultPlan plan = keyed_plan(&transport::FaultPlan::delay, 0.5);
  {
    KeyedLinks pair(plan, kOtherSecret);
    CHECK_EQ(error_code([&] { pair.connect(); }), code(ErrorCode::kAuthentication));
    CHECK_EQ(pair.server.frame_count() + pair.server.closed_count(), 0u);
  }
  KeyedLinks pair(plan, "");
  const auto connection = pair.connect();
  connection->send(make_frame(wire::FrameKind::kHello, 0, 0));
  CHECK(pair.client.wait_closed(1));
  const std::vector<wire::Frame> told = pair.client.take_frames();
  CHECK_EQ(told.size(), 1u);
  CHECK(told.at(0).header.kind == wire::FrameKind::kError);
  CHECK_EQ(wire::decode_error(told.at(0).payload.bytes()).message,
           std::string(wire::no_key_here().what()));
  CHECK_EQ(pair.server.frame_count() + pair.server.closed_count(), 0u);
}

TEST(inproc_keyed_attempts_end_when_the_connector_stops) {
  KeyedLinks pair(keyed_plan(&transport::FaultPlan::drop, 1));
  pair.connector->stop_attempts();
  CHECK_EQ(error_code([&] { pair.connect(); }), code(ErrorCode::kAddress));
}

TEST(inproc_without_faults_asks_nobody) {
  KeyedLinks pair(transport::FaultPlan{}, "");
  pair.connect()->send(make_frame(wire::FrameKind::kHello, 0, 0));
  CHECK_EQ(pair.server.frame_count(), 1u);
}
