// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Faults of the in-process channel: each kind does what it says, is counted, and is the same for
// the same seed.

#include <algorithm>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "transport/inproc/channel.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

constexpr uint64_t kFrames = 200;

struct Outcome {
  std::vector<uint64_t> ids;  // as delivered
  transport::FaultCounts counts;
  bool reliable = true;
};

// Sends frames 1 .. kFrames one way and closes; the close arrives behind everything.
Outcome run(const transport::FaultPlan& plan) {
  Recorder server;
  Recorder client;
  const auto network = transport::InprocNetwork::create(plan);
  const auto listener = network->listen("server", &server);
  const auto connector = network->connector(&client);
  const auto connection = connector->connect("inproc:server", soon());
  for (uint64_t id = 1; id <= kFrames; ++id) {
    if (!connection->send(make_frame(wire::FrameKind::kPush, id, 8, static_cast<uint8_t>(id))))
      break;
  }
  Outcome outcome;
  outcome.reliable = connection->reliable();
  connection->close("done");
  CHECK(server.wait_closed(1));
  outcome.counts = network->counts();
  listener->stop();
  connector->stop();
  CHECK_EQ(server.broken_promises() + client.broken_promises(), std::string());
  for (const wire::Frame& frame : server.take_frames()) {
    CHECK(has_fill(frame, 8, static_cast<uint8_t>(frame.header.request_id)));
    outcome.ids.push_back(frame.header.request_id);
  }
  return outcome;
}

bool increasing(const std::vector<uint64_t>& ids) {
  return std::is_sorted(ids.begin(), ids.end(), std::less_equal<>());
}

std::vector<uint64_t> distinct(std::vector<uint64_t> ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace

TEST(inproc_faults_drop) {
  transport::FaultPlan plan;
  plan.drop = 0.3;
  plan.seed = 1;
  const Outcome outcome = run(plan);
  CHECK(!outcome.reliable);
  CHECK(outcome.counts.dropped > 20);
  CHECK_EQ(outcome.ids.size() + outcome.counts.dropped, kFrames);
  CHECK_EQ(outcome.counts.delivered, outcome.ids.size());
  CHECK(increasing(outcome.ids));
  CHECK(run(plan).ids == outcome.ids);
  plan.seed = 2;
  CHECK(run(plan).ids != outcome.ids);
}

TEST(inproc_faults_duplicate) {
  transport::FaultPlan plan;
  plan.duplicate = 0.3;
  const Outcome outcome = run(plan);
  CHECK(!outcome.reliable);
  CHECK(outcome.counts.duplicated > 20);
  CHECK_EQ(outcome.ids.size(), kFrames + outcome.counts.duplicated);
  CHECK(std::is_sorted(outcome.ids.begin(), outcome.ids.end()));
  CHECK_EQ(distinct(outcome.ids).size(), kFrames);
}

TEST(inproc_faults_reorder_loses_nothing) {
  transport::FaultPlan plan;
  plan.reorder = 0.3;
  const Outcome outcome = run(plan);
  CHECK(outcome.counts.reordered > 20);
  CHECK_EQ(outcome.ids.size(), kFrames);
  CHECK(!increasing(outcome.ids));
  CHECK_EQ(distinct(outcome.ids).size(), kFrames);
}

TEST(inproc_faults_release_a_frame_that_none_follows) {
  transport::FaultPlan plan;
  plan.reorder = 1;
  Recorder server;
  Recorder client;
  const auto network = transport::InprocNetwork::create(plan);
  const auto listener = network->listen("server", &server);
  const auto connector = network->connector(&client);
  const auto connection = connector->connect("inproc:server", soon());
  CHECK(connection->send(make_frame(wire::FrameKind::kPush, 1, 8)));
  CHECK(server.wait_frames(1));
  CHECK_EQ(network->counts().reordered, 0u);
  connector->stop();
  listener->stop();
}

TEST(inproc_faults_delay_keeps_the_order) {
  transport::FaultPlan plan;
  plan.delay = 0.3;
  plan.delay_ms_max = 2;
  const Outcome outcome = run(plan);
  CHECK(outcome.counts.delayed > 20);
  CHECK_EQ(outcome.ids.size(), kFrames);
  CHECK(increasing(outcome.ids));
}

TEST(inproc_faults_cut_closes_both_ends) {
  transport::FaultPlan plan;
  plan.cut = 0.05;
  plan.seed = 4;
  const Outcome outcome = run(plan);
  CHECK_EQ(outcome.counts.cut, 1u);
  CHECK(outcome.ids.size() < kFrames);
  CHECK(increasing(outcome.ids));
}

TEST(inproc_faults_all_at_once_answer_and_stop) {
  transport::FaultPlan plan;
  plan.drop = plan.duplicate = plan.reorder = plan.delay = 0.2;
  plan.cut = 0.01;
  plan.delay_ms_max = 3;
  plan.seed = 11;
  Recorder server;
  Recorder client;
  server.on_each = [](const auto& connection, wire::Frame& frame) {
    connection->send(make_frame(wire::FrameKind::kReply, frame.header.request_id, 8));
  };
  const auto network = transport::InprocNetwork::create(plan);
  const auto listener = network->listen("server", &server);
  const auto connector = network->connector(&client);
  // A link that is cut answers no more, and when that is depends on the threads.
  size_t links = 0;
  for (const TimePoint deadline = soon(); links < 5 || client.frame_count() < 50; ++links) {
    CHECK(Clock::now() < deadline);
    const auto connection = connector->connect("inproc:server", soon());
    for (uint64_t id = 1; id <= 100; ++id)
      connection->send(make_frame(wire::FrameKind::kPush, id, 8));
  }
  connector->stop();
  listener->stop();
  CHECK_EQ(server.closed_count(), links);
  CHECK_EQ(client.closed_count(), links);
  const transport::FaultCounts counts = network->counts();
  CHECK(counts.dropped > 0 && counts.duplicated > 0 && counts.reordered > 0 && counts.delayed > 0);
  CHECK_EQ(server.broken_promises() + client.broken_promises(), std::string());
}

TEST(inproc_faults_need_probabilities) {
  transport::FaultPlan plan;
  plan.drop = 1.5;
  CHECK_EQ(error_code([&] { transport::InprocNetwork::create(plan); }),
           code(ErrorCode::kInvalidArgument));
}
