// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// DC-ASGD as a server makes it: which values a gradient is compared with, what is kept until when,
// and the arithmetic.

#include <cmath>
#include <thread>

#include "support/patience.h"
#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

constexpr int64_t kKey = 3;

wire::ParamSetLayout compensated_layout(wire::DelayCompensation compensation) {
  wire::ParamSetLayout layout = small_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.compensation = compensation;
  return layout;
}

wire::DelayCompensation constant(double factor) {
  return {wire::Compensation::kConstant, factor, 0, 0};
}

// Trainers whose pulls and pushes are numbered as a client numbers them. Gradients are of row kKey
// and of both blocks.
struct Compensated : World {
  explicit Compensated(wire::DelayCompensation compensation,
                       server::ServerOptions given = server_options(2))
      : World(compensated_layout(compensation), given) {}

  float pull_row(size_t rank, uint64_t step) {
    return ask_row(rank, step, trainers[rank]->next_request());
  }
  float ask_row(size_t rank, uint64_t step, uint64_t request) {
    const wire::TableRef ref{0, 1, 4, 0, false, 0};
    wire::FilledKeys pull = wire::layout_pull(std::span(&ref, 1), nullptr, step);
    pull.keys[0][0] = kKey;
    Trainer& asker = *trainers[rank];
    asker.deliver(asker.header(wire::FrameKind::kPullRows, 0, request, 0), std::move(pull.payload));
    const wire::Frame frame = asker.reply(request);
    wire::Version version;
    return wire::decode_rows(view(frame.payload), std::span(&ref, 1), &version)[0][0];
  }
  uint64_t pull_all(size_t rank, uint64_t step) {  // the version of the dense values
    return ask_all(rank, step, trainers[rank]->next_request());
  }
  uint64_t ask_all(size_t rank, uint64_t step, uint64_t request) {
    Trainer& asker = *trainers[rank];
    asker.deliver(asker.header(wire::FrameKind::kPullDense, 0, request, 0),
                  wire::encode_pull_dense(step));
    return dense(asker.reply(request)).version.round;
  }
  void give(size_t rank, uint64_t step, uint64_t version, double value) {
    wire::PushHeader header;
    header.configs = layout.configs;
    header.step = step;
    header.round = version;
    const wire::BlockRef blocks[] = {{0, 16, 0, 0}, {1, 24, 0, 0}};
    const wire::TableRef ref{0, 1, 4, 0, false, 0};
    wire::FilledPush push = wire::layout_push(header, blocks, std::span(&ref, 1), nullptr);
    const std::vector<float> narrow(4, static_cast<float>(value));
    const std::vector<double> wide(3, value);
    std::memcpy(push.blocks[0], narrow.data(), 16);
    std::memcpy(push.blocks[1], wide.data(), 24);
    push.keys[0][0] = kKey;
    std::memcpy(push.rows[0], narrow.data(), 16);
    trainers[rank]->reply(trainers[rank]->ask(wire::FrameKind::kPush, std::move(push.payload)));
  }
  float row_now() { return row(kKey)[0]; }  // asked for no gradient
  uint64_t backup_bytes() const { return server.stats().backup_bytes; }
};

float compensated(float g, float weight, float read, float factor) {
  const volatile float first = factor * g;
  const volatile float second = first * g;
  const volatile float term = second * (weight - read);
  return term == 0.0f ? g : g + term;
}

}  // namespace

TEST(compensation_compares_with_what_the_trainer_had_read) {
  Compensated world(constant(0.5));
  float row = world.pull_row(0, 1);
  CHECK_EQ(world.pull_row(1, 1), row);
  CHECK_EQ(world.pull_all(0, 1), 0);
  CHECK_EQ(world.pull_all(1, 1), 0);
  const float read = row;
  world.give(0, 1, 0, 2.0);  // nothing has moved: as it is
  row -= 2.0f;
  CHECK_EQ(world.row_now(), row);
  CHECK_EQ(world.floats(0)[0], 8.0f);
  world.give(1, 1, 0, 3.0);
  row -= compensated(3.0f, row, read, 0.5f);
  CHECK_EQ(world.row_now(), row);
  CHECK_EQ(world.floats(0)[0], 8.0f - compensated(3.0f, 8.0f, 10.0f, 0.5f));
  CHECK_EQ(world.doubles(1)[0], 8.0 - (3.0 + 0.5 * 3.0 * 3.0 * (8.0 - 10.0)));
}

TEST(compensation_finds_rows_by_step_while_later_ones_are_read_already) {
  Compensated world(constant(0.25));
  const float first = world.pull_row(0, 1);
  world.pull_row(1, 1);
  world.give(1, 1, 99, 1.0);
  const float second = world.pull_row(0, 2);  // for the next gradient, before the first is pushed
  CHECK_EQ(second, first - 1.0f);
  world.pull_row(1, 2);
  world.give(1, 2, 99, 1.0);
  float row = first - 2.0f;
  world.give(0, 1, 99, 2.0);
  row -= compensated(2.0f, row, first, 0.25f);
  CHECK_EQ(world.row_now(), row);
  world.give(0, 2, 99, 2.0);
  row -= compensated(2.0f, row, second, 0.25f);
  CHECK_EQ(world.row_now(), row);
}

// Either of two answers may be the one that the trainer takes.
TEST(compensation_answers_a_request_that_comes_twice_as_at_first) {
  Compensated world(constant(0.25));
  const uint64_t rows = world[0].next_request();
  const uint64_t blocks = world[0].next_request();
  const float read = world.ask_row(0, 1, rows);
  CHECK_EQ(world.ask_all(0, 1, blocks), 0);
  world.give(1, 1, 99, 1.0);
  CHECK_EQ(world.ask_row(0, 1, rows), read);
  CHECK_EQ(world.ask_all(0, 1, blocks), 1);  // both versions are kept, the push names one
  float row = read - 1.0f;
  world.give(0, 1, 0, 2.0);
  row -= compensated(2.0f, row, read, 0.25f);
  CHECK_EQ(world.row_now(), row);
  CHECK_EQ(world.floats(0)[0], 9.0f - compensated(2.0f, 9.0f, 10.0f, 0.25f));
  // Another request for the same gradient is answered with what stands there now.
  const float second = world.pull_row(0, 2);
  world.give(1, 2, 99, 1.0);
  CHECK_EQ(world.pull_row(0, 2), second - 1.0f);
}

TEST(compensation_finds_dense_values_by_version) {
  Compensated world(constant(0.25));
  CHECK_EQ(world.pull_all(0, 1), 0);
  world.give(0, 1, 0, 1.0);  // its reply brings version 1
  world.give(0, 2, 0, 1.0);  // computed before that came; the reply brings version 2
  float weight = 9.0f - compensated(1.0f, 9.0f, 10.0f, 0.25f);
  CHECK_EQ(world.floats(0)[0], weight);
  world.give(0, 3, 1, 1.0);
  weight -= compensated(1.0f, weight, 9.0f, 0.25f);
  CHECK_EQ(world.floats(0)[0], weight);
  world.give(0, 4, 0, 1.0);  // older than what it has used before: no longer there, as it is
  CHECK_EQ(world.floats(0)[0], weight - 1.0f);
}

TEST(compensation_of_what_was_never_read_is_none) {
  Compensated world(constant(0.5));
  world.give(0, 1, 0, 1.0);
  world.give(1, 1, 7, 2.0);
  CHECK_EQ(world.floats(0)[0], 7.0f);
  CHECK_EQ(world.row_now(), initial_weight(kKey, 0) - 3.0f);
}

TEST(compensation_adaptive_divides_by_the_root_of_the_running_mean) {
  const double epsilon = 1e-3;
  Compensated world({wire::Compensation::kAdaptive, 2.0, 0.75, epsilon});
  world.pull_all(0, 1);
  world.pull_all(1, 1);
  world.give(0, 1, 0, 2.0);
  world.give(1, 1, 0, 3.0);
  double mean = 0.75 * 0.0 + (1.0 - 0.75) * (2.0 * 2.0);
  mean = 0.75 * mean + (1.0 - 0.75) * (3.0 * 3.0);
  const double factor = 2.0 / std::sqrt(mean + epsilon);
  const double expected = 8.0 - (3.0 + factor * 3.0 * 3.0 * (8.0 - 10.0));
  CHECK_EQ(world.doubles(1)[0], expected);
}

TEST(compensation_keeps_each_backup_until_its_gradient_has_come) {
  Compensated world(constant(0.5));
  CHECK_EQ(world.backup_bytes(), 0);
  world.row_now();
  CHECK_EQ(world.backup_bytes(), 0);  // for no gradient
  world.pull_row(0, 1);
  const uint64_t one_row = world.backup_bytes();
  CHECK(one_row >= 16);
  world.pull_row(0, 1);                             // again for the same one
  CHECK(world.backup_bytes() <= one_row + 16 + 8);  // room for a row and its key
  world.pull_row(0, 2);
  const uint64_t rows = world.backup_bytes();
  CHECK(rows >= 2 * one_row);
  for (int i = 0; i < 3; ++i) world.pull_all(0, 2);
  const uint64_t dense = world.backup_bytes() - rows;
  CHECK(dense < 2 * (16 + 24 + 64));
  CHECK(dense >= 16 + 24);
  world.give(0, 2, 0, 1.0);
  CHECK(world.backup_bytes() <= 2 * dense);  // what it was computed on, and its reply
  world.pull_row(0, 1);                      // overtaken by its own gradient
  CHECK(world.backup_bytes() <= 2 * dense);
}

TEST(compensation_ends_with_its_trainer) {
  for (const wire::FrameKind kind :
       {wire::FrameKind::kLeave, wire::FrameKind::kClose, wire::FrameKind::kGoodbye}) {
    Compensated world(constant(0.5));
    world.pull_row(1, 1);
    world.pull_all(1, 1);
    CHECK(world.backup_bytes() > 0);
    world[1].reply(
        world[1].ask(kind, Buffer(), kind == wire::FrameKind::kGoodbye ? wire::kNoParamSet : 0));
    CHECK_EQ(world.backup_bytes(), 0);
  }
  server::ServerOptions options = server_options(2);
  options.reconnect_grace_ms = 30;
  Compensated world(constant(0.5), options);
  world.pull_row(1, 1);
  world[1].disconnect();
  const TimePoint deadline = Clock::now() + kPatience;
  while (world.backup_bytes() > 0 && Clock::now() < deadline) std::this_thread::yield();
  CHECK_EQ(world.backup_bytes(), 0);
}

TEST(compensation_ends_when_values_are_stored) {
  Compensated world({wire::Compensation::kAdaptive, 1.0, 0.5, 1e-6});
  world.pull_row(1, 1);
  world.pull_all(1, 1);
  world.give(0, 1, 0, 1.0);
  CHECK(world.backup_bytes() > 0);
  world[0].reply(world[0].ask(wire::FrameKind::kStore, store_all(world.layout, world.options)));
  CHECK_EQ(world.backup_bytes(), 0);
  world.give(1, 1, 0, 2.0);  // computed on what was overwritten
  CHECK_EQ(world.floats(0)[0], 8.0f);
}

TEST(compensation_that_differs_between_trainers_is_a_mismatch) {
  const auto told = [](wire::DelayCompensation other) {
    server::ServerOptions options = server_options(2);
    options.elastic = true;
    World world(compensated_layout(constant(0.5)), options, false);
    Trainer third(world.server, 1, 2);
    third.reply(third.hello(2, 1), wire::FrameKind::kHello);
    return third.error(third.ask(wire::FrameKind::kOpen, encode(compensated_layout(other))),
                       ErrorCode::kConfigMismatch);
  };
  CHECK(contains(told(constant(0.25)), "delay compensation, factor: 0.5 against 0.25"));
  CHECK(
      contains(told({wire::Compensation::kAdaptive, 0.5, 0.9, 1e-7}), "delay compensation, kind"));
}

}  // namespace cpudist::testing
