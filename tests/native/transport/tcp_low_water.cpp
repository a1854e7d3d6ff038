// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Large payloads that come in small pieces: their reader is woken for some of them together, and no
// byte waits for one that does not come.

#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "base/crc32c.h"
#include "base/wait.h"
#include "support/check.h"
#include "support/tcp_fixture.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

using std::chrono::milliseconds;

constexpr size_t kPieceBytes = 1000;

// One thread for all connections, and timers that nobody waits for.
transport::ListenOptions one_reader(milliseconds stalled = std::chrono::hours(24)) {
  transport::ListenOptions options;
  options.threads = 1;
  options.incoming.stalled = stalled;
  return options;
}

std::vector<uint8_t> some_payload(size_t size_bytes) {
  std::vector<uint8_t> payload(size_bytes);
  for (size_t i = 0; i < size_bytes; ++i) payload[i] = static_cast<uint8_t>(i * 31 + i / 251);
  return payload;
}

bool came(const transport::Connection& connection, uint64_t size_bytes) {
  const TimePoint deadline = soon();
  while (connection.bytes_received() < size_bytes && Clock::now() < deadline) {
    let_pass(milliseconds(1));
  }
  return connection.bytes_received() >= size_bytes;
}

// The listener's only thread has looked at all its sockets.
bool looked(TcpPair& pair, const Recorder::Peer& other) {
  const size_t frames = pair.server.frame_count();
  return other->send(make_frame(wire::FrameKind::kHeartbeat, 1, 0)) &&
         pair.server.wait_frames(frames + 1);
}

// A connection that has brought the header of a push, and nothing else.
struct Begun {
  explicit Begun(TcpPair& pair, const std::vector<uint8_t>& payload)
      : other(pair.greet(false)),
        socket(half_sent(pair, payload.size(), crc32c(payload.data(), payload.size()))) {
    CHECK(pair.server.wait_opened(2));
    link = pair.server.opened(1);
    heads = begun_push(0).size();
    CHECK(came(*link, heads));
  }
  bool more(const std::vector<uint8_t>& payload, size_t size_bytes) {
    const bool done = raw_send(socket, payload.data() + sent, size_bytes);
    sent += size_bytes;
    return done;
  }

  Recorder::Peer other;
  Descriptor socket;
  Recorder::Peer link;
  size_t heads = 0;
  size_t sent = 0;
};

}  // namespace

TEST(tcp_low_water_wakes_a_reader_for_many_pieces_together) {
  TcpPair pair(one_reader());
  const std::vector<uint8_t> payload = some_payload(1u << 20);
  Begun begun(pair, payload);
  CHECK(looked(pair, begun.other));  // so it waits for more than one now
  for (int i = 0; i < 8; ++i) {
    CHECK(begun.more(payload, kPieceBytes));
    CHECK(looked(pair, begun.other));
    CHECK_EQ(begun.link->bytes_received(), begun.heads);
  }
  const size_t frames = pair.server.frame_count();
  // The end comes without anything behind it, and so does what follows.
  while (begun.sent < payload.size()) {
    CHECK(begun.more(payload, std::min(payload.size() - begun.sent, size_t{100'000})));
  }
  CHECK(pair.server.wait_frames(frames + 1));
  wire::FrameHeader header;
  header.kind = wire::FrameKind::kHeartbeat;
  const auto small = wire::encode_header(header);
  CHECK(raw_send(begun.socket, small.data(), small.size()));
  CHECK(pair.server.wait_frames(frames + 2));
  for (const wire::Frame& frame : pair.server.take_frames()) {
    if (frame.header.kind != wire::FrameKind::kPush) continue;
    CHECK(std::equal(payload.begin(), payload.end(), frame.payload.data(),
                     frame.payload.data() + frame.payload.size()));
    return;
  }
  CHECK(false);  // no push came
}

TEST(tcp_low_water_lets_no_byte_wait_for_those_that_do_not_come) {
  TcpPair pair(one_reader(milliseconds(20)));
  const std::vector<uint8_t> payload = some_payload(1u << 20);
  Begun begun(pair, payload);
  bool all = true;
  for (int i = 0; i < 5 && all; ++i) {
    all = begun.more(payload, kPieceBytes) && came(*begun.link, begun.heads + begun.sent);
  }
  CHECK(all);
}

TEST(tcp_low_water_hears_the_end_of_a_stream) {
  TcpPair pair(one_reader());
  const std::vector<uint8_t> payload = some_payload(1u << 20);
  Begun begun(pair, payload);
  CHECK(looked(pair, begun.other));
  CHECK(begun.more(payload, kPieceBytes));
  CHECK_EQ(shutdown(begun.socket.get(), SHUT_WR), 0);
  CHECK(pair.server.wait_closed(1));
  CHECK(pair.server.reason(0).find("in the middle of a frame") != std::string::npos);
}
