// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frames that begin and do not end: how long each may take, and what all of them may hold.

#include "transport/incoming.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/wait.h"
#include "support/check.h"
#include "support/tcp_fixture.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT
using transport::FlowBudget;
using transport::FlowLimits;
using transport::Incoming;

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kMiB = 1u << 20;

std::shared_ptr<Incoming> incoming(uint64_t budget_bytes) {
  return std::make_shared<Incoming>(FlowLimits(), std::make_shared<FlowBudget>(budget_bytes));
}

// A hello, and the header of a push that is to have so many bytes.
std::vector<uint8_t> begun_push(uint64_t length) {
  std::vector<uint8_t> bytes;
  for (const auto kind : {wire::FrameKind::kHello, wire::FrameKind::kPush}) {
    wire::FrameHeader header;
    header.kind = kind;
    header.length = kind == wire::FrameKind::kHello ? 0 : length;
    const auto encoded = wire::encode_header(header);
    bytes.insert(bytes.end(), encoded.begin(), encoded.end());
  }
  return bytes;
}

Descriptor half_sent(const TcpPair& pair, uint64_t length) {
  Descriptor socket = raw_socket(pair.address(false));
  const auto begun = begun_push(length);
  CHECK(raw_send(socket, begun.data(), begun.size()));
  return socket;
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
uint64_t resident_bytes() {
  uint64_t all = 0;
  uint64_t resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * 4096;
}
#else
// Of what sanitizers keep beside it nothing can be said.
uint64_t resident_bytes() { return 0; }
#endif

}  // namespace

TEST(incoming_frame_that_does_not_get_on_is_overdue) {
  const auto all = incoming(kMiB);
  const TimePoint begun = Clock::now();
  const auto frame = all->begin(begun);
  frame->came(100, 100, begun + seconds(9));
  CHECK(!frame->overdue(begun + seconds(9)));
  CHECK(mentions(frame->overdue(begun + seconds(10)).value(), "within 10000 ms"));
  // Bytes now and then are not enough; a step is.
  frame->came(transport::kFlowStepBytes, 200, begun + seconds(12));
  CHECK(!frame->overdue(begun + seconds(21)));
  CHECK(frame->overdue(begun + seconds(22)).has_value());
  CHECK_EQ(all->held_bytes(), 200u);
}

TEST(incoming_frames_that_began_last_wait_where_there_is_too_much) {
  const auto all = incoming(4 * kMiB);
  const TimePoint now = Clock::now();
  std::vector<std::unique_ptr<Incoming::Frame>> frames;
  for (int i = 0; i < 5; ++i) {
    frames.push_back(all->begin(now));
    frames.back()->came(kMiB, kMiB, now);
  }
  CHECK_EQ(all->held_bytes(), 5 * kMiB);
  // Half the budget goes on together.
  CHECK(frames[0]->may_grow(now) && frames[1]->may_grow(now));
  CHECK(!frames[2]->may_grow(now) && !frames[4]->may_grow(now));
  // Of those that may not get on nobody is blamed for it; of the others soon.
  CHECK(!frames[4]->overdue(now + milliseconds(1100)));
  CHECK(mentions(frames[0]->overdue(now + milliseconds(1000)).value(), "holds 5242880 of 4194304"));
  frames.erase(frames.begin());
  CHECK_EQ(all->held_bytes(), 4 * kMiB);
  CHECK(frames[1]->may_grow(now + milliseconds(1100)));
  CHECK(!frames[1]->overdue(now + milliseconds(2000)));
}

TEST(incoming_frame_waits_no_longer_than_its_sender_can) {
  const auto all = incoming(kMiB);
  const TimePoint now = Clock::now();
  const auto first = all->begin(now);
  const auto second = all->begin(now);
  first->came(kMiB, kMiB, now);
  second->came(kMiB, kMiB, now);
  CHECK(first->may_grow(now));  // the oldest always
  CHECK(!second->may_grow(now) && !second->may_grow(now + milliseconds(1240)));
  CHECK(second->may_grow(now + milliseconds(1250)));
  CHECK(!second->overdue(now + milliseconds(2200)));
  CHECK(second->overdue(now + milliseconds(2250)).has_value());
}

TEST(incoming_limits_are_those_of_the_machine_and_no_shorter_than_a_liveness) {
  FlowLimits limits;
  CHECK(limits.budget_bytes >= 256 * kMiB && limits.budget_bytes <= 4096 * kMiB);
  limits.heed(seconds(100));
  CHECK(limits.slow == seconds(200) && limits.patience > limits.stalled);
  limits.heed(milliseconds(100));
  CHECK(limits.slow == seconds(200));
}

TEST(incoming_tcp_frame_of_a_byte_now_and_then_closes_its_connection) {
  for (const uint64_t length : {uint64_t{1000}, 64 * kMiB}) {
    transport::ListenOptions options = listen_options();
    options.flow.slow = milliseconds(100);
    options.flow.stalled = milliseconds(100);
    TcpPair pair(options);
    const auto good = pair.greet(false);
    const Descriptor bad = half_sent(pair, length);
    const TimePoint deadline = soon();
    const uint8_t byte = 1;
    // Fewer than the smaller frame has.
    for (int i = 0; i < 900 && pair.server.closed_count() == 0 && Clock::now() < deadline; ++i) {
      static_cast<void>(raw_send(bad, &byte, 1));
      let_pass(milliseconds(5));
    }
    CHECK(pair.server.wait_closed(1));
    CHECK(mentions(pair.server.reason(0), "neither ended nor got on"));
    const size_t frames = pair.server.frame_count();
    CHECK(good->send(make_frame(wire::FrameKind::kPush, 1, 100)));
    CHECK(pair.server.wait_frames(frames + 1));
    CHECK_EQ(pair.broken_promises(), std::string());
  }
}

TEST(incoming_tcp_frames_that_are_half_sent_hold_a_bounded_memory) {
  constexpr size_t kSenders = 8;
  transport::ListenOptions options = listen_options();
  options.flow.budget_bytes = 32 * kMiB;
  options.flow.stalled = milliseconds(100);
  options.flow.patience = seconds(60);
  TcpPair pair(options);
  const auto good = pair.greet(false);
  const uint64_t before = resident_bytes();
  std::atomic<bool> over{false};
  std::atomic<uint64_t> most{before};
  std::thread look([&] {
    while (!over) {
      most = std::max(most.load(), resident_bytes());
      let_pass(milliseconds(1));
    }
  });
  const std::vector<uint8_t> some(kMiB, 1);
  std::vector<Descriptor> sockets;
  for (size_t i = 0; i < kSenders; ++i) {
    sockets.push_back(half_sent(pair, 320 * kMiB));  // no pool keeps that
  }
  std::vector<std::thread> senders;
  for (const Descriptor& socket : sockets) {
    senders.emplace_back([&] {
      for (int sent = 0; sent < 64; ++sent) {
        if (!raw_send(socket, some.data(), some.size())) return;
      }
      const TimePoint deadline = soon();  // and no more
      while (pair.server.closed_count() < kSenders && Clock::now() < deadline) {
        let_pass(milliseconds(5));
      }
    });
  }
  // Whoever gets on is taken meanwhile.
  bool taken = true;
  for (uint64_t i = 1; i <= 4; ++i) {
    const size_t frames = pair.server.frame_count();
    taken = taken && good->send(make_frame(wire::FrameKind::kPush, i, kMiB)) &&
            pair.server.wait_frames(frames + 1);
  }
  const bool closed = pair.server.wait_closed(kSenders);
  over = true;
  look.join();
  for (std::thread& sender : senders) sender.join();
  CHECK(taken && closed && !good->closed());
  // Of 512 MiB that were to be held.
  CHECK(most.load() - before < 256 * kMiB);
  CHECK_EQ(pair.broken_promises(), std::string());
}
