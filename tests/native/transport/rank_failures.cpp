// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Connections over a lane that close, and lanes that break.

#include <string>
#include <vector>

#include "support/check.h"
#include "support/rank_fixture.h"
#include "transport/ranks/message.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

bool says(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(rank_a_closed_connection_can_be_replaced) {
  FabricPair pair;
  const auto first = pair.greet();
  first->close("done");
  CHECK(!first->send(make_frame(wire::FrameKind::kPush, 1, 3)));
  CHECK(pair.b.server.wait_closed(1));
  CHECK(says(pair.b.server.reason(0), "the peer closed"));
  const auto second = pair.greet();
  CHECK(second->send(make_frame(wire::FrameKind::kPush, 2, 3)));
  CHECK(pair.b.server.wait_frames(3));
  // The other end closes: the same.
  pair.b.server.opened(1)->close("enough");
  CHECK(pair.a.client.wait_closed(2));
  CHECK(second->closed());
  CHECK(pair.greet()->send(make_frame(wire::FrameKind::kPush, 3, 3)));
  CHECK(pair.b.server.wait_frames(5));
  CHECK_EQ(pair.b.server.closed_count(), size_t{2});
  CHECK_EQ(pair.broken_promises(), std::string());
}

TEST(rank_a_newer_connection_ends_the_older_one_first) {
  FabricPair pair;
  const auto first = pair.greet();
  const auto second = pair.greet();
  CHECK(first->closed());
  CHECK(pair.b.server.wait_closed(1));
  CHECK(says(pair.b.server.reason(0), "replaced"));
  CHECK(!second->closed());
}

TEST(rank_a_violation_closes_that_connection_only) {
  FabricPair pair;
  const auto rude = pair.a.connect(1);
  rude->send(make_frame(wire::FrameKind::kPush, 1, 5000));
  CHECK(pair.b.server.wait_closed(1));
  CHECK(says(pair.b.server.reason(0), "first frame must be a hello"));
  const auto large = pair.a.connect(1);
  large->send(make_frame(wire::FrameKind::kHello, 1, 5000));
  CHECK(pair.b.server.wait_closed(2));
  CHECK(says(pair.b.server.reason(1), "at most 4096"));
  pair.b.server.on_each = [](const auto&, wire::Frame& frame) {
    if (frame.header.kind == wire::FrameKind::kStore) throw Error(ErrorCode::kProtocol, "no sense");
  };
  const auto senseless = pair.greet();
  senseless->send(make_frame(wire::FrameKind::kStore, 1, 10));
  CHECK(pair.b.server.wait_closed(3));
  CHECK_EQ(pair.b.server.reason(2), std::string("no sense"));
  const auto damaged = pair.greet();
  pair.fabric->damage(0, 1, 333, 17);
  damaged->send(make_frame(wire::FrameKind::kPush, 1, 333));
  CHECK(pair.b.server.wait_closed(4));
  CHECK(says(pair.b.server.reason(3), "damaged"));
  const size_t before = pair.b.server.frame_count();
  CHECK(pair.greet()->send(make_frame(wire::FrameKind::kPush, 9, 3)));
  CHECK(pair.b.server.wait_frames(before + 2));
  CHECK_EQ(pair.broken_promises(), std::string());
}

TEST(rank_a_damaged_message_breaks_the_lane_for_good) {
  for (const size_t offset : {size_t{0}, size_t{9}, transport::ranks::kPrefixBytes + 40}) {
    FabricPair pair;
    const auto connection = pair.greet();
    pair.fabric->damage(0, 1, transport::ranks::kMessageBytes, offset);
    connection->send(make_frame(wire::FrameKind::kPush, 1, 10));
    CHECK(pair.b.server.wait_closed(1));
    CHECK(says(pair.b.server.reason(0), "checksum") || says(pair.b.server.reason(0), "magic"));
    CHECK_EQ(error_code([&] { pair.b.connect(0); }), code(ErrorCode::kPeerLost));
  }
}

TEST(rank_a_dead_peer_closes_both_connections) {
  FabricPair pair;
  const auto to_b = pair.greet();
  const auto to_a = pair.b.connect(0);
  to_a->send(make_frame(wire::FrameKind::kHello, 0, 0));
  CHECK(pair.a.server.wait_frames(1));
  pair.fabric->kill(1);
  CHECK(pair.a.client.wait_closed(1));
  CHECK(pair.a.server.wait_closed(1));
  CHECK(says(pair.a.client.reason(0), "killed"));
  CHECK(to_b->closed());
  std::string text;
  try {
    pair.a.connect(1);
  } catch (const Error& error) {
    text = error.what();
  }
  CHECK(says(text, "c10d:1"));
  CHECK(says(text, "cannot be made again"));
  CHECK_EQ(pair.broken_promises(), std::string());
}

TEST(rank_a_goodbye_comes_after_what_was_sent) {
  FabricPair pair;
  const auto connection = pair.greet();
  for (uint64_t i = 0; i < 20; ++i) connection->send(make_frame(wire::FrameKind::kPush, i, 50000));
  connection->send(make_frame(wire::FrameKind::kError, 99, 10));
  pair.a.network->stop();
  CHECK(connection->closed());
  CHECK(pair.b.server.wait_closed(1));
  CHECK_EQ(pair.b.server.frame_count(), size_t{22});
  CHECK(says(pair.b.server.reason(0), "ended its part"));
  // Not the cause of a loss: another rank's death may be why it ended.
  CHECK_EQ(error_code([&] { pair.b.connect(0); }), code(ErrorCode::kClosed));
  CHECK_EQ(error_code([&] { pair.a.connect(1); }), code(ErrorCode::kClosed));
  pair.a.network->stop();  // again: nothing
  CHECK_EQ(pair.broken_promises(), std::string());
}

TEST(rank_stop_does_not_wait_for_a_frozen_peer) {
  FabricPair pair;
  const auto connection = pair.greet();
  pair.fabric->hold(0, 1);
  pair.fabric->hold(1, 0);
  connection->send(make_frame(wire::FrameKind::kPush, 1, 100000));
  const TimePoint begun = Clock::now();
  pair.a.network->stop();
  CHECK(Clock::now() - begun < std::chrono::seconds(5));
  CHECK(connection->closed());
  CHECK_EQ(pair.a.client.closed_count(), size_t{1});
}

TEST(rank_a_peer_that_takes_nothing_is_frozen) {
  transport::ChannelLimits limits;
  limits.outbound_cap_bytes = 10000;
  limits.outbound_deadline_ms = 50;
  FabricPair pair(limits);
  const auto connection = pair.greet();
  pair.fabric->hold(0, 1);
  CHECK(connection->send(make_frame(wire::FrameKind::kPush, 1, 8000)));
  CHECK(!connection->send(make_frame(wire::FrameKind::kPush, 2, 8000)));
  CHECK(pair.a.client.wait_closed(1));
  CHECK(says(pair.a.client.reason(0), "frozen"));
}

TEST(rank_stopped_listeners_and_connectors_open_nothing) {
  FabricPair pair;
  const auto served = pair.greet();
  pair.b.listener->stop();
  CHECK(pair.a.client.wait_closed(1));
  CHECK(served->closed());
  CHECK_EQ(pair.b.server.closed_count(), size_t{1});  // stop() waits for the last callback
  const auto refused = pair.a.connect(1);
  refused->send(make_frame(wire::FrameKind::kHello, 0, 0));
  CHECK(pair.a.client.wait_closed(2));
  CHECK_EQ(pair.b.server.frame_count(), size_t{1});
  // Another listener takes over.
  Recorder next;
  const auto listener = pair.b.network->listen(&next);
  CHECK_EQ(error_code([&] { pair.b.network->listen(&next); }), code(ErrorCode::kAddress));
  CHECK(pair.a.connect(1)->send(make_frame(wire::FrameKind::kHello, 0, 0)));
  CHECK(next.wait_frames(1));
  pair.a.connector->stop();
  CHECK_EQ(error_code([&] { pair.a.connect(1); }), code(ErrorCode::kClosed));
  CHECK(next.wait_closed(1));
  listener->stop();
}

TEST(rank_peers_and_addresses_are_checked) {
  const auto fabric = std::make_shared<Fabric>(3);
  const auto transport = std::make_shared<FabricTransport>(fabric, 0);
  for (const auto& peers : std::vector<std::vector<uint32_t>>{{3}, {0}, {1, 1}}) {
    CHECK_EQ(error_code([&] { transport::RankNetwork::create(transport, peers); }),
             code(ErrorCode::kInvalidArgument));
  }
  Recorder handler;
  const auto network = transport::RankNetwork::create(transport, {1});
  const auto connector = network->connector(&handler);
  for (const char* address : {"c10d:2", "c10d:", "c10d:x", "c10d:1x", "tcp:1"}) {
    CHECK_EQ(error_code([&] { connector->connect(address, soon()); }), code(ErrorCode::kAddress));
  }
}
