// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Peers that die, stall, stay silent or send garbage: only their own connection ends.

#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <span>
#include <thread>

#include "base/process_end.h"

#include "support/check.h"
#include "support/tcp_fixture.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

std::array<uint8_t, wire::kHeaderBytes> header_of(wire::FrameKind kind, uint64_t length,
                                                  uint32_t crc = 0) {
  wire::FrameHeader header;
  header.kind = kind;
  header.length = length;
  header.payload_crc = crc;
  return wire::encode_header(header);
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// What the server says about a connection that sends these bytes; a good one must go on working.
std::string reason_for(const std::vector<uint8_t>& bytes, bool hang_up) {
  TcpPair pair;
  const auto good = pair.greet(false);
  auto bad = raw_socket(pair.address(false));
  CHECK(raw_send(bad, bytes.data(), bytes.size()));
  if (hang_up) bad.reset();
  CHECK(pair.server.wait_closed(1));
  const size_t frames = pair.server.frame_count();
  CHECK(good->send(make_frame(wire::FrameKind::kPush, 1, 100)));
  CHECK(pair.server.wait_frames(frames + 1));
  CHECK_EQ(pair.server.closed_count(), 1u);
  CHECK_EQ(pair.broken_promises(), std::string());
  return pair.server.reason(0);
}

std::vector<uint8_t> join(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  std::vector<uint8_t> all(a.begin(), a.end());
  all.insert(all.end(), b.begin(), b.end());
  return all;
}

}  // namespace

TEST(tcp_close_reaches_both_ends_once) {
  for (const bool unix_socket : {false, true}) {
    TcpPair pair;
    const auto connection = pair.greet(unix_socket);
    // What was sent before the close still arrives.
    CHECK(connection->send(make_frame(wire::FrameKind::kPush, 7, 100)));
    connection->close("enough");
    connection->close("again");
    CHECK(connection->closed());
    CHECK(!connection->send(make_frame(wire::FrameKind::kPush, 8, 1)));
    CHECK(pair.client.wait_closed(1) && pair.server.wait_closed(1));
    CHECK_EQ(pair.client.reason(0), std::string("enough"));
    CHECK_EQ(pair.server.reason(0), std::string("the peer closed the connection"));
    CHECK_EQ(pair.server.frame_count(), 2u);
    CHECK_EQ(pair.broken_promises(), std::string());
  }
}

// Kernels before 5.3 have none, and some containers refuse them: clocks decide there.
bool has_pidfds() {
  const Descriptor own(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  return own.get() >= 0;
}

TEST(tcp_process_at_the_other_end_of_a_unix_socket_is_known_and_seen_to_end) {
  if (!has_pidfds()) return;
  TcpPair pair;
  const auto hello = header_of(wire::FrameKind::kHello, 0);
  const pid_t child = fork();
  if (child == 0) {
    try {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const auto socket = raw_socket(pair.address(true));
      if (!raw_send(socket, hello.data(), hello.size())) _exit(1);
      while (true) pause();
    } catch (...) {
      _exit(1);
    }
  }
  const bool came = pair.server.wait_frames(1);
  Descriptor theirs;
  if (came) theirs = pair.server.opened(0)->peer_process();
  const bool lived = !has_ended(theirs);
  CHECK_EQ(kill(child, SIGKILL), 0);
  CHECK_EQ(waitpid(child, nullptr, 0), child);
  CHECK(came && theirs.get() >= 0 && lived && has_ended(theirs));
  CHECK(pair.server.wait_closed(1));
  CHECK(pair.server.opened(0)->peer_process().get() < 0);
}

TEST(tcp_process_at_the_other_end_is_not_asked_for_where_descriptors_are_few) {
  TcpPair pair;
  const auto beside = pair.greet(true);
  rlimit files{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const Descriptor highest(dup(0));
  const rlimit few{static_cast<rlim_t>(highest.get()) * 2, files.rlim_max};
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const bool none = beside->peer_process().get() < 0;
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  CHECK(none);
}

TEST(tcp_process_at_the_other_end_is_this_one_or_not_known) {
  if (!has_pidfds()) return;
  TcpPair pair;
  const auto beside = pair.greet(true);
  const Descriptor process = beside->peer_process();
  CHECK(process.get() >= 0 && !has_ended(process));
  const auto beyond = pair.greet(false);
  CHECK(beyond->peer_process().get() < 0);
  CHECK(!has_ended(Descriptor()));
}

TEST(tcp_refusal_sent_before_a_close_arrives) {
  TcpPair pair;
  pair.server.on_each = [](const auto& connection, wire::Frame&) {
    connection->send(make_frame(wire::FrameKind::kError, 0, 40));
    connection->close("refused");
  };
  const auto connection = pair.connect(false);
  CHECK(connection->send(make_frame(wire::FrameKind::kHello, 0, 10)));
  CHECK(pair.client.wait_closed(1));
  const auto frames = pair.client.take_frames();
  CHECK_EQ(frames.size(), 1u);
  CHECK(frames[0].header.kind == wire::FrameKind::kError);
}

// A peer that ends says why. Its words arrive although bytes for it were under way or cannot be
// sent any more.
TEST(tcp_last_words_outlive_what_was_sent_to_a_dead_peer) {
  for (const bool unix_socket : {false, true}) {
    TcpPair pair;
    std::mutex busy;
    pair.server.on_each = [&](const auto& connection, wire::Frame& frame) {
      if (frame.header.kind == wire::FrameKind::kHello) {
        connection->send(make_frame(wire::FrameKind::kHello, 0, 0));
        return;
      }
      connection->send(make_frame(wire::FrameKind::kError, 0, 40));
      connection->close("an end with bytes unread");
    };
    pair.client.on_each = [&](const auto&, wire::Frame& frame) {
      if (frame.header.kind == wire::FrameKind::kHello) const std::lock_guard hold(busy);
    };
    std::unique_lock hold(busy);  // the client does not read yet
    const auto connection = pair.connect(unix_socket);
    CHECK(connection->send(make_frame(wire::FrameKind::kHello, 0, 0)));
    // No more than sockets take: what waits in a queue would be left to the client's own thread,
    // which is held, and then no send says that the peer is gone.
    for (int i = 0; i < 50; ++i) {
      if (!connection->send(make_frame(wire::FrameKind::kPush, 1, 1 << 10))) break;
    }
    CHECK(pair.server.wait_closed(1));
    pair.listener->stop();
    while (connection->send(make_frame(wire::FrameKind::kPush, 2, 1 << 10))) {
    }
    hold.unlock();
    CHECK(pair.client.wait_closed(1));
    const auto frames = pair.client.take_frames();
    CHECK_EQ(frames.size(), 2u);
    CHECK(frames.back().header.kind == wire::FrameKind::kError);
    CHECK_EQ(pair.broken_promises(), std::string());
  }
}

TEST(tcp_half_a_frame_closes_that_connection) {
  const auto hello = header_of(wire::FrameKind::kHello, 0);
  const auto push = header_of(wire::FrameKind::kPush, 1000);
  const std::vector<uint8_t> half_header(push.begin(), push.begin() + 30);
  CHECK(contains(reason_for(half_header, true), "after 30 of at least 64 bytes"));
  const auto half_payload = join(join(hello, push), std::vector<uint8_t>(10, 1));
  CHECK(contains(reason_for(half_payload, true), "after 74 of 1064 bytes"));
}

TEST(tcp_garbage_closes_that_connection) {
  const auto hello = header_of(wire::FrameKind::kHello, 0);
  CHECK(contains(reason_for(std::vector<uint8_t>(200, 'G'), false), "expected magic"));
  CHECK(contains(reason_for(join(hello, std::vector<uint8_t>(64, 0)), false), "expected magic"));
  const auto push = header_of(wire::FrameKind::kPush, 0);
  CHECK(contains(reason_for({push.begin(), push.end()}, false), "must be a hello"));
  const auto long_hello = header_of(wire::FrameKind::kHello, 4097);
  CHECK(contains(reason_for({long_hello.begin(), long_hello.end()}, false), "above the limit"));
  const auto huge = join(hello, header_of(wire::FrameKind::kPush, 1ull << 40));
  CHECK(contains(reason_for(huge, false), "above the limit"));
  const auto damaged = join(header_of(wire::FrameKind::kHello, 4, 123), std::vector<uint8_t>(4, 1));
  CHECK(contains(reason_for(damaged, false), "payload of a frame is damaged"));
}

TEST(tcp_handler_refuses_a_frame_by_throwing) {
  TcpPair pair;
  pair.server.on_each = [](const auto&, wire::Frame& frame) {
    if (frame.header.request_id == 13) throw Error(ErrorCode::kProtocol, "bad luck");
  };
  const auto bad = pair.greet(false);
  const auto good = pair.greet(true);
  CHECK(bad->send(make_frame(wire::FrameKind::kPush, 13, 1)));
  CHECK(pair.server.wait_closed(1) && pair.client.wait_closed(1));
  CHECK_EQ(pair.server.reason(0), std::string("bad luck"));
  CHECK(bad->closed() && !good->closed());
}

TEST(tcp_silent_sockets_end_and_do_not_delay_others) {
  transport::ListenOptions options = listen_options();
  options.limits.handshake_deadline_ms = 200;
  TcpPair pair(options);
  std::vector<Descriptor> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(raw_socket(pair.address(i % 2 == 0)));
  const auto hello = header_of(wire::FrameKind::kHello, 0);
  CHECK(raw_send(silent[0], hello.data(), 63));  // a slow start is not a frame
  const auto start = Clock::now();
  const auto connection = pair.greet(true);
  CHECK(Clock::now() - start < std::chrono::seconds(5));  // machine under load, but not forever
  CHECK(pair.server.wait_closed(silent.size()));
  CHECK(contains(pair.server.reason(0), "no complete first frame within 200 ms"));
  CHECK(!connection->closed());
  CHECK_EQ(pair.server.closed_count(), silent.size());
}

TEST(tcp_slow_reader_is_closed_as_frozen) {
  for (const bool unix_socket : {false, true}) {
    transport::ListenOptions options = listen_options();
    options.limits.outbound_cap_bytes = 1 << 20;
    options.limits.outbound_deadline_ms = 50;
    options.limits.socket_buffer_bytes = 1 << 16;
    TcpPair pair(options);
    auto slow = raw_socket(pair.address(unix_socket));
    const auto hello = header_of(wire::FrameKind::kHello, 0);
    CHECK(raw_send(slow, hello.data(), hello.size()));
    CHECK(pair.server.wait_frames(1));
    const auto connection = pair.server.opened(0);
    size_t sent = 0;
    while (sent < 1000 && connection->send(make_frame(wire::FrameKind::kReply, 1, 1 << 18))) ++sent;
    CHECK(sent >= 4 && sent < 1000);  // the cap, and what the kernel buffers
    CHECK(connection->closed());
    CHECK(pair.server.wait_closed(1));
    CHECK(contains(pair.server.reason(0), "frozen"));
  }
}

TEST(tcp_sender_waits_for_a_reader_that_catches_up) {
  transport::ListenOptions options = listen_options();
  options.limits.outbound_cap_bytes = 1 << 20;
  TcpPair pair(options);
  const auto connection = pair.greet(true);
  for (uint64_t i = 0; i < 60; ++i) {
    CHECK(connection->send(
        make_frame(wire::FrameKind::kPush, i + 1, 1 << 18, static_cast<uint8_t>(i))));
  }
  CHECK(pair.server.wait_frames(61));
  const auto frames = pair.server.take_frames();
  for (uint64_t i = 0; i < 60; ++i)
    CHECK(has_fill(frames[i + 1], 1 << 18, static_cast<uint8_t>(i)));
}

TEST(tcp_close_wakes_a_waiting_sender) {
  transport::ListenOptions options = listen_options();
  options.limits.outbound_cap_bytes = 1 << 16;
  options.limits.socket_buffer_bytes = 1 << 16;
  TcpPair pair(options);
  auto slow = raw_socket(pair.address(true));
  const auto hello = header_of(wire::FrameKind::kHello, 0);
  CHECK(raw_send(slow, hello.data(), hello.size()));
  CHECK(pair.server.wait_frames(1));
  const auto connection = pair.server.opened(0);
  std::thread sender([connection] {
    while (connection->send(make_frame(wire::FrameKind::kReply, 1, 1 << 16))) {
    }
  });
  slow.reset();  // the peer dies
  const bool closed = pair.server.wait_closed(1);
  sender.join();
  CHECK(closed);
}
