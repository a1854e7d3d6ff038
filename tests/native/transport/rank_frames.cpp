// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frames over a lane between two ranks: order, pieces, both directions at once, counts.

#include <thread>
#include <vector>

#include "support/check.h"
#include "support/rank_fixture.h"
#include "transport/ranks/message.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

constexpr size_t kPiece = transport::ranks::kPieceBytes;
const std::vector<size_t> kSizes = {0, 1, 100, kPiece, kPiece + 1, 9 * kPiece + 3, 7};

void exchange_frames(size_t at_once) {
  FabricPair pair({}, at_once);
  const auto answer = [](const std::shared_ptr<transport::Connection>& connection,
                         wire::Frame& frame) {
    const auto kind = frame.header.kind == wire::FrameKind::kHello ? wire::FrameKind::kHello
                                                                   : wire::FrameKind::kReply;
    const uint64_t id = frame.header.request_id;
    connection->send(make_frame(kind, id, frame.payload.size(), static_cast<uint8_t>(id + 1)));
  };
  pair.a.server.on_each = pair.b.server.on_each = answer;
  const auto talk = [](FabricRank& from, uint32_t to) {
    const auto connection = from.connect(to);
    connection->send(make_frame(wire::FrameKind::kHello, 0, 0));
    for (size_t i = 0; i < kSizes.size(); ++i) {
      connection->send(
          make_frame(wire::FrameKind::kPush, i + 1, kSizes[i], static_cast<uint8_t>(i)));
    }
    CHECK(from.client.wait_frames(kSizes.size() + 1));
    CHECK(connection->bytes_sent() == connection->bytes_received());
  };
  std::thread other([&] { talk(pair.b, 0); });
  talk(pair.a, 1);
  other.join();
  for (FabricRank* rank : {&pair.a, &pair.b}) {
    const auto requests = rank->server.take_frames();
    const auto replies = rank->client.take_frames();
    size_t size_bytes = transport::ranks::kMessageBytes;
    for (size_t i = 0; i < kSizes.size(); ++i) {
      CHECK(has_fill(requests.at(i + 1), kSizes[i], static_cast<uint8_t>(i)));
      CHECK(has_fill(replies.at(i + 1), kSizes[i], static_cast<uint8_t>(i + 2)));
      CHECK_EQ(replies.at(i + 1).header.request_id, i + 1);
      size_bytes += transport::ranks::kMessageBytes + kSizes[i];
    }
    CHECK_EQ(rank->server.opened(0)->bytes_received(), size_bytes);
  }
  CHECK_EQ(pair.broken_promises(), std::string());
}

}  // namespace

TEST(rank_frames_arrive_whole_and_in_order_in_both_directions) { exchange_frames(4); }

TEST(rank_frames_over_a_backend_that_orders_one_message_at_a_time) { exchange_frames(1); }

TEST(rank_several_threads_send_on_one_connection) {
  FabricPair pair;
  const auto connection = pair.greet();
  constexpr size_t kThreads = 4;
  constexpr size_t kEach = 50;
  std::vector<std::thread> senders;
  for (size_t i = 0; i < kThreads; ++i) {
    senders.emplace_back([&, i] {
      for (size_t n = 0; n < kEach; ++n) {
        connection->send(make_frame(wire::FrameKind::kPush, i * kEach + n, 10 * n));
      }
    });
  }
  for (std::thread& sender : senders) sender.join();
  CHECK(pair.b.server.wait_frames(1 + kThreads * kEach));
  std::vector<uint64_t> next(kThreads, 0);
  const auto frames = pair.b.server.take_frames();
  for (size_t i = 1; i < frames.size(); ++i) {
    const uint64_t id = frames[i].header.request_id;
    CHECK_EQ(id % kEach, next.at(id / kEach)++);
    CHECK(has_fill(frames[i], 10 * (id % kEach)));
  }
}

TEST(rank_a_long_payload_shows_that_the_peer_takes_it) {
  FabricPair pair;
  const auto connection = pair.greet();
  const uint64_t before = connection->bytes_moved();
  connection->send(make_frame(wire::FrameKind::kPush, 1, 100));
  CHECK(pair.b.server.wait_frames(2));
  CHECK_EQ(connection->bytes_moved(), before);  // a backend may have taken it at once
  connection->send(make_frame(wire::FrameKind::kPush, 2, 3 * kPiece));
  connection->send(make_frame(wire::FrameKind::kPush, 3, 0));
  CHECK(pair.b.server.wait_frames(4));
  CHECK_EQ(connection->bytes_moved(), before + 2 * kPiece);
}

TEST(rank_a_payload_without_memory_is_thrown_away) {
  struct Refusing : Recorder {
    Buffer payload_memory(const wire::FrameHeader& header,
                          const std::shared_ptr<BufferPool>& pool) override {
      return header.kind == wire::FrameKind::kPush
                 ? Buffer()
                 : transport::ConnectionHandler::payload_memory(header, pool);
    }
  };
  const auto fabric = std::make_shared<Fabric>(2);
  FabricRank a(fabric, 0, {1});
  Refusing server;
  const auto network = transport::RankNetwork::create(std::make_shared<FabricTransport>(fabric, 1),
                                                      std::vector<uint32_t>{0});
  const auto listener = network->listen(&server);
  const auto connection = a.connect(1);
  connection->send(make_frame(wire::FrameKind::kHello, 0, 0));
  connection->send(make_frame(wire::FrameKind::kPush, 1, 2 * kPiece + 5));
  connection->send(make_frame(wire::FrameKind::kStore, 2, 30));
  CHECK(server.wait_frames(3));
  const auto frames = server.take_frames();
  CHECK(frames[1].dropped);
  CHECK_EQ(frames[1].payload.size(), size_t{0});
  CHECK(!frames[2].dropped);
  CHECK(has_fill(frames[2], 30));
  listener->stop();
}
