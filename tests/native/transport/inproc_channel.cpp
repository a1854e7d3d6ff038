// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The in-process channel without faults: hand-over in the sender's thread, closing, stopping.

#include "transport/inproc/channel.h"

#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "support/channel_fixture.h"
#include "support/check.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

struct Pair {
  explicit Pair(const transport::FaultPlan& plan = {})
      : network(transport::InprocNetwork::create(plan)),
        listener(network->listen("server", &server)),
        connector(network->connector(&client)) {}
  std::shared_ptr<transport::Connection> connect() {
    return connector->connect("inproc:server", soon());
  }

  Recorder server;
  Recorder client;
  std::shared_ptr<transport::InprocNetwork> network;
  std::unique_ptr<transport::Listener> listener;
  std::shared_ptr<transport::Connector> connector;
};

}  // namespace

TEST(inproc_hands_the_payload_over_in_the_senders_thread) {
  Pair pair;
  CHECK_EQ(pair.listener->addresses().front(), std::string("inproc:server"));
  std::thread::id handled_in;
  const uint8_t* handled = nullptr;
  pair.server.on_each = [&](const auto& connection, wire::Frame& frame) {
    handled_in = std::this_thread::get_id();
    handled = frame.payload.data();
    connection->send(make_frame(wire::FrameKind::kReply, frame.header.request_id, 3, 9));
  };
  const auto connection = pair.connect();
  CHECK(connection->reliable());
  wire::Frame frame = make_frame(wire::FrameKind::kPush, 5, 1000);
  const uint8_t* sent = frame.payload.data();
  CHECK(connection->send(std::move(frame)));
  CHECK(handled_in == std::this_thread::get_id());
  CHECK(handled == sent);  // moved, not copied
  const auto replies = pair.client.take_frames();
  CHECK_EQ(replies.size(), 1u);
  CHECK_EQ(replies[0].header.request_id, 5u);
  CHECK_EQ(replies[0].header.length, 3u);
  CHECK(has_fill(replies[0], 3, 9));
  CHECK_EQ(connection->bytes_sent(), wire::kHeaderBytes + 1000);
  CHECK_EQ(connection->bytes_received(), wire::kHeaderBytes + 3);
}

TEST(inproc_close_reaches_both_ends_once) {
  Pair pair;
  const auto connection = pair.connect();
  pair.server.opened(0)->close("enough");
  pair.server.opened(0)->close("again");
  CHECK(connection->closed());
  CHECK(!connection->send(make_frame(wire::FrameKind::kHello, 1, 1)));
  CHECK_EQ(pair.server.reason(0), std::string("enough"));
  CHECK_EQ(pair.client.reason(0), std::string("closed by the peer: enough"));
  connection->close("late");
  CHECK_EQ(pair.client.closed_count(), 1u);
  CHECK_EQ(pair.server.closed_count(), 1u);
}

TEST(inproc_on_close_waits_for_the_running_callback) {
  Pair pair;
  size_t closed_inside = 1;
  pair.server.on_each = [&](const auto& connection, wire::Frame&) {
    connection->close("from inside");
    closed_inside = pair.server.closed_count();
  };
  const auto connection = pair.connect();
  CHECK(!connection->send(make_frame(wire::FrameKind::kHello, 1, 1)));
  CHECK_EQ(closed_inside, 0u);
  CHECK_EQ(pair.server.closed_count(), 1u);
  CHECK_EQ(pair.server.broken_promises(), std::string());
}

TEST(inproc_protocol_error_closes_that_connection_only) {
  Pair pair;
  pair.server.on_each = [](const auto&, wire::Frame& frame) {
    if (frame.header.request_id == 13) throw Error(ErrorCode::kProtocol, "bad luck");
  };
  const auto bad = pair.connect();
  const auto good = pair.connect();
  CHECK(!bad->send(make_frame(wire::FrameKind::kPush, 13, 1)));
  CHECK(bad->closed());
  CHECK_EQ(pair.server.reason(0), std::string("bad luck"));
  CHECK(good->send(make_frame(wire::FrameKind::kPush, 1, 1)));
}

TEST(inproc_addresses_are_checked) {
  Pair pair;
  const uint32_t refused = code(ErrorCode::kAddress);
  CHECK_EQ(error_code([&] { pair.network->listen("server", &pair.server); }), refused);
  CHECK_EQ(error_code([&] { pair.connector->connect("inproc:other", soon()); }), refused);
  const auto dispatch = make_connector(pair.connector, nullptr);
  CHECK(!dispatch->connect("inproc:server", soon())->closed());
  CHECK_EQ(error_code([&] { dispatch->connect("tcp:127.0.0.1:1", soon()); }), refused);
  CHECK_EQ(error_code([&] { dispatch->connect("carrier-pigeon:1", soon()); }), refused);
  pair.listener->stop();
  CHECK_EQ(error_code([&] { pair.connect(); }), refused);
  const auto again = pair.network->listen("server", &pair.server);  // the name is free again
}

TEST(inproc_stop_ends_all_callbacks_during_traffic) {
  Pair pair;
  pair.server.keep_frames = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pair, connection = pair.connect()] {
      while (connection->send(make_frame(wire::FrameKind::kPush, 1, 10))) {
      }
    });
  }
  const bool traffic = pair.server.wait_frames(100);
  pair.listener->stop();
  const size_t frames = pair.server.frame_count();
  CHECK_EQ(pair.server.closed_count(), 4u);
  for (auto& thread : threads) thread.join();
  CHECK(traffic);
  CHECK_EQ(pair.server.frame_count(), frames);
  CHECK(pair.client.wait_closed(4));
  CHECK_EQ(pair.server.broken_promises() + pair.client.broken_promises(), std::string());
}

TEST(inproc_refuses_use_in_a_forked_child) {
  Pair pair;
  const auto connection = pair.connect();
  const pid_t child = fork();
  if (child == 0) {
    const auto use = [&] { connection->send(make_frame(wire::FrameKind::kHello, 1, 1)); };
    const bool refused = error_code(use) == code(ErrorCode::kClosed) &&
                         error_code([&] { pair.connect(); }) == code(ErrorCode::kClosed);
    pair.listener->stop();  // returns at once
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(connection->send(make_frame(wire::FrameKind::kHello, 1, 1)));
}
