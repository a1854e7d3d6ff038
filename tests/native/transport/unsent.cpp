// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Answers that nobody takes: whose requests wait for it, and what all of them may hold.

#include "transport/unsent.h"

#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/wait.h"
#include "support/check.h"
#include "support/tcp_fixture.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT
using transport::FlowBudget;
using transport::FlowLimits;
using transport::Unsent;

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kUnit = 1u << 20;

// A listener that answers a hello, and each request with so many bytes, and counts these.
class AnsweringPair {
 public:
  AnsweringPair(transport::ListenOptions options, size_t answer_bytes) : pair(options) {
    pair.server.keep_frames = pair.client.keep_frames = false;
    pair.server.on_each = [this, answer_bytes](const Recorder::Peer& peer, wire::Frame& request) {
      wire::Frame answer;
      // The first answer is small.
      answer.header.kind = wire::FrameKind::kHello;
      if (request.header.kind != wire::FrameKind::kPullDense) {
        static_cast<void>(peer->send(std::move(answer)));
        return;
      }
      answer.header.kind = wire::FrameKind::kReply;
      answer.header.request_id = request.header.request_id;
      answer.payload = Buffer(answer_bytes);
      std::memset(answer.payload.data(), 1, answer_bytes);
      ++answered;
      static_cast<void>(peer->send(std::move(answer)));
    };
  }

  std::atomic<size_t> answered{0};
  TcpPair pair;
};

// A hello and so many requests, by somebody who takes no answer.
Descriptor ask_and_take_nothing(const TcpPair& pair, bool unix_socket, uint64_t requests) {
  Descriptor socket = raw_socket(pair.address(unix_socket));
  std::vector<uint8_t> bytes;
  for (uint64_t i = 0; i <= requests; ++i) {
    wire::FrameHeader header;
    header.kind = i == 0 ? wire::FrameKind::kHello : wire::FrameKind::kPullDense;
    header.request_id = i;
    const auto encoded = wire::encode_header(header);
    bytes.insert(bytes.end(), encoded.begin(), encoded.end());
  }
  CHECK(raw_send(socket, bytes.data(), bytes.size()));
  return socket;
}

}  // namespace

TEST(unsent_bytes_hold_back_whom_they_are_for_and_others_for_a_moment) {
  const auto budget = std::make_shared<FlowBudget>(100);
  const TimePoint now = Clock::now();
  Unsent takes_not(FlowLimits(), budget);
  Unsent takes(FlowLimits(), budget);
  takes_not.note(100, 0, now);
  CHECK(!takes_not.holds_back(now) && !takes.holds_back(now));
  takes_not.note(150, 0, now);
  CHECK(takes_not.holds_back(now) && takes_not.holds_back(now + seconds(100)));
  CHECK(!takes.holds_back(now));
  takes_not.note(202, 0, now);
  CHECK(takes.holds_back(now) && takes.holds_back(now + milliseconds(1240)));
  CHECK(!takes.holds_back(now + milliseconds(1250)));
  // It goes on, until something waits for it, too.
  CHECK(!takes.holds_back(now + milliseconds(1260)));
  takes.note(1, 0, now);
  CHECK(takes.holds_back(now + milliseconds(1270)));
  takes.note(0, 1, now);
  CHECK(takes.holds_back(now + milliseconds(1280)));
  takes_not.note(99, 103, now);
  CHECK(!takes_not.holds_back(now) && !takes.holds_back(now));
}

TEST(unsent_bytes_are_given_up_where_their_memory_is_wanted) {
  const auto budget = std::make_shared<FlowBudget>(kUnit);
  const TimePoint now = Clock::now();
  {
    Unsent first(FlowLimits(), budget);
    Unsent second(FlowLimits(), budget);
    CHECK(!first.overdue(now + seconds(100)));
    first.note(kUnit, 0, now);
    CHECK(!first.overdue(now + seconds(100)));  // nobody needs it
    second.note(kUnit, 0, now + seconds(10));
    CHECK(mentions(first.overdue(now + seconds(10)).value(), "holds 2097152 of 1048576"));
    CHECK(!second.overdue(now + milliseconds(10'999)));
    CHECK(second.overdue(now + milliseconds(11'000)).has_value());
    // A byte now and then is not enough; a step is.
    second.note(kUnit - 1, 1, now + milliseconds(10'900));
    CHECK(second.overdue(now + milliseconds(11'000)).has_value());
    second.note(kUnit - transport::kFlowStepBytes, transport::kFlowStepBytes,
                now + milliseconds(10'900));
    CHECK(!second.overdue(now + milliseconds(11'800)));
    CHECK_EQ(budget->taken_bytes(), 2 * kUnit - transport::kFlowStepBytes);
  }
  CHECK_EQ(budget->taken_bytes(), 0u);
}

TEST(unsent_tcp_answers_that_nobody_takes_hold_a_bounded_memory) {
  constexpr size_t kAskers = 8;
  constexpr size_t kRequests = 64;
  transport::ListenOptions options = listen_options();
  options.flow.budget_bytes = 32 * kUnit;
  options.flow.stalled = milliseconds(300);
  options.flow.patience = milliseconds(350);
  AnsweringPair answering(options, 8 * kUnit);
  TcpPair& pair = answering.pair;
  const auto good = pair.greet(false);
  std::vector<Descriptor> askers;
  for (size_t i = 0; i < kAskers; ++i) {
    askers.push_back(ask_and_take_nothing(pair, i % 2 == 0, kRequests));
  }
  // Whoever takes its answers is served meanwhile.
  constexpr size_t kServed = 4;
  for (size_t i = 1; i <= kServed; ++i) {
    CHECK(good->send(make_frame(wire::FrameKind::kPullDense, i, 0)));
    CHECK(pair.client.wait_frames(1 + i));
  }
  CHECK(pair.server.wait_closed(kAskers));
  for (size_t i = 0; i < kAskers; ++i) CHECK(mentions(pair.server.reason(i), "frozen: of "));
  CHECK(!good->closed());
  // Of 512: one that is under way for each, what the budget has whenever one of them has gone, and
  // what the kernel took.
  CHECK(answering.answered.load() <= kServed + 8 * kAskers);
  CHECK_EQ(pair.broken_promises(), std::string());
}

TEST(unsent_tcp_answers_beyond_the_budget_come_whole_and_in_order) {
  constexpr uint64_t kRequests = 40;
  transport::ListenOptions options = listen_options();
  options.flow.budget_bytes = kUnit / 2;
  AnsweringPair answering(options, kUnit);
  TcpPair& pair = answering.pair;
  std::mutex mutex;
  std::map<const transport::Connection*, uint64_t> last;
  bool in_order = true;
  pair.client.on_each = [&](const Recorder::Peer& peer, wire::Frame& answer) {
    const std::lock_guard lock(mutex);
    uint64_t& before = last[peer.get()];
    if (answer.header.kind == wire::FrameKind::kHello) return;
    in_order = in_order && answer.payload.size() == kUnit && answer.header.request_id == ++before;
  };
  std::vector<std::shared_ptr<transport::Connection>> links;
  for (int i = 0; i < 4; ++i) links.push_back(pair.greet(i % 2 == 0));
  for (uint64_t id = 1; id <= kRequests; ++id) {
    for (const auto& link : links)
      CHECK(link->send(make_frame(wire::FrameKind::kPullDense, id, 0)));
  }
  CHECK(pair.client.wait_frames((1 + kRequests) * links.size()));
  CHECK(in_order);
  CHECK_EQ(answering.answered.load(), kRequests * links.size());
  for (const auto& link : links) CHECK(!link->closed());
  CHECK_EQ(pair.broken_promises(), std::string());
}
