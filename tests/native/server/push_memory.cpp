// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Memory of pushes that come in: what has none is read past, refused with a type, and sent again.

#include <atomic>
#include <thread>

#include "support/server_fixture.h"
#include "support/tcp_fixture.h"

namespace cpudist::testing {
namespace {

// Has no memory for the payloads of pulls.
class Forgetful final : public Recorder {
 public:
  Buffer payload_memory(const wire::FrameHeader& header,
                        const std::shared_ptr<BufferPool>& pool) override {
    if (header.kind == wire::FrameKind::kPullRows) return Buffer();
    return Recorder::payload_memory(header, pool);
  }
};

void check_dropped(bool unix_socket) {
  Forgetful server;
  Recorder client;
  const auto listener = listen_tcp(listen_options(), &server);
  const auto connector = make_tcp_connector(&client, transport::ChannelLimits{});
  const auto connection = connector->connect(listener->addresses().at(unix_socket ? 0 : 1), soon());
  connection->send(make_frame(wire::FrameKind::kHello, 0, 0));
  CHECK(server.wait_frames(1));
  const size_t sizes[] = {0, 1, 100, 65536, 70000, 3 << 20};
  uint64_t request = 0;
  for (const size_t size : sizes) {
    connection->send(make_frame(wire::FrameKind::kPullRows, ++request, size));
    connection->send(make_frame(wire::FrameKind::kPush, ++request, size, 5));
  }
  CHECK(server.wait_frames(1 + request));
  const auto frames = server.take_frames();
  for (size_t i = 0; i < std::size(sizes); ++i) {
    const wire::Frame& dropped = frames[1 + 2 * i];
    CHECK_EQ(dropped.header.length, sizes[i]);
    CHECK_EQ(dropped.dropped, sizes[i] != 0);
    CHECK(dropped.payload.empty());
    CHECK(has_fill(frames[2 + 2 * i], sizes[i], 5));
    CHECK(!frames[2 + 2 * i].dropped);
  }
  connector->stop();
  listener->stop();
  CHECK_EQ(server.broken_promises() + client.broken_promises(), std::string());
}

wire::FrameHeader push_of(uint64_t size_bytes) {
  wire::FrameHeader header;
  header.kind = wire::FrameKind::kPush;
  header.length = size_bytes;
  return header;
}

void deliver_dropped(World& world, size_t rank, const wire::FrameHeader& header,
                     uint64_t size_bytes) {
  wire::Frame frame{header, Buffer(), true};
  frame.header.length = size_bytes;
  world.server.on_frame(world[rank].connection(), std::move(frame));
}

}  // namespace

TEST(push_memory_frames_without_memory_are_read_past_over_tcp) { check_dropped(false); }
TEST(push_memory_frames_without_memory_are_read_past_over_unix_sockets) { check_dropped(true); }

TEST(push_memory_is_reserved_with_the_header_and_given_back_with_the_payload) {
  server::ServerOptions options = server_options(1);
  options.memory_cap_bytes = 100000 + values_bytes(on_arrival(), options);
  World world(on_arrival(), options);
  const auto pool = std::make_shared<BufferPool>(0);
  Buffer first = world.server.payload_memory(push_of(60000), pool);
  CHECK_EQ(first.size(), 60000);
  CHECK(world.server.payload_memory(push_of(50000), pool).empty());
  Buffer second = world.server.payload_memory(push_of(40000), pool);
  CHECK_EQ(second.size(), 40000);
  CHECK(world.server.payload_memory(push_of(1), pool).empty());
  wire::FrameHeader read = push_of(500000);
  read.kind = wire::FrameKind::kPullRows;
  CHECK_EQ(world.server.payload_memory(read, pool).size(), 500000);  // no push
  const Buffer handle = first.share();
  first = Buffer();
  CHECK(world.server.payload_memory(push_of(50000), pool).empty());  // a handle is left
  second = Buffer();
  CHECK_EQ(world.server.payload_memory(push_of(40000), pool).size(), 40000);
  CHECK(world.server.payload_memory(push_of(100001), pool).empty());
}

TEST(push_memory_leaves_room_for_one_push_beside_those_that_wait) {
  const auto cap = std::make_shared<MemoryCap>(100);
  const auto parked = cap->reserve(90, 0);
  CHECK(parked.has_value());
  CHECK(!cap->reserve(20, 0).has_value());
  {
    const auto incoming = cap->reserve(20, 90);
    CHECK(incoming.has_value());
    CHECK(!cap->reserve(20, 90).has_value());
  }
  CHECK_EQ(cap->used_bytes(), 90);
  CHECK(!cap->reserve(101, 90).has_value());
}

TEST(push_memory_threads_never_exceed_the_cap) {
  const auto cap = std::make_shared<MemoryCap>(1000);
  std::atomic<uint64_t> most{0};
  std::atomic<int> granted{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 2000; ++i) {
        const auto reservation = cap->reserve(200 + 50 * t, 0);
        if (reservation) ++granted;
        uint64_t seen = most.load();
        const uint64_t used = cap->used_bytes();
        while (seen < used && !most.compare_exchange_weak(seen, used)) {
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(most <= 1000);
  CHECK(granted > 0);
  CHECK_EQ(cap->used_bytes(), 0);
}

TEST(push_memory_dropped_push_is_refused_and_its_number_comes_again) {
  server::ServerOptions options = server_options(1);
  options.memory_cap_bytes = 10000;
  World world(on_arrival(), options);
  Trainer& trainer = world[0];
  PushSpec spec;
  spec.blocks[0] = {1, 1, 1, 1};
  const uint64_t sequence = trainer.sequence() + 1;
  const uint64_t refused = trainer.next_request();
  deliver_dropped(world, 0, trainer.header(wire::FrameKind::kPush, 0, refused, sequence), 500);
  CHECK(contains(trainer.error(refused, ErrorCode::kOverloaded), "memory_cap_bytes = 10000"));
  trainer.reply(world.push(0, spec));
  CHECK_EQ(trainer.sequence(), sequence);
  CHECK_EQ(world.floats(0)[0], 9.0f);
  // A copy of a push that was taken: the recorded answer, whether there is memory or not.
  const uint64_t copy = trainer.next_request();
  deliver_dropped(world, 0, trainer.header(wire::FrameKind::kPush, 0, copy, sequence), 500);
  CHECK_EQ(world.dense(trainer.reply(copy)).version.round, 1);
  const uint64_t never = trainer.next_request();
  deliver_dropped(world, 0, trainer.header(wire::FrameKind::kPush, 0, never, sequence + 1), 10001);
  CHECK(contains(trainer.error(never, ErrorCode::kInvalidArgument), "never fits"));
}

}  // namespace cpudist::testing
