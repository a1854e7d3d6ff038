// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Small messages: hello, error, probe, membership, norms, fetch requests.

#include <cmath>

#include "wire/checks.h"
#include "wire/messages.h"

namespace cpudist::wire {
namespace {

constexpr uint32_t kErrorCodeLast = static_cast<uint32_t>(ErrorCode::kAddress);

bool flag(uint32_t value, const char* what) {
  if (value > 1) {
    refuse(std::string(what) + ": expected 0 or 1, found " + std::to_string(value));
  }
  return value == 1;
}

double norm(double value, const char* what) {
  // Infinite or NaN gradients are the trainers' business; a negative norm is nobody's.
  if (value < 0) refuse(std::string(what) + " is negative");
  return value;
}

}  // namespace

Buffer encode(const Hello& message) {
  if (message.host.size() > kHostBytesMax) {
    throw Error(ErrorCode::kInvalidArgument, "a host name of " +
                                                 std::to_string(message.host.size()) +
                                                 " bytes does not fit into a hello");
  }
  Writer writer;
  writer.u32(message.trainer_count);
  writer.u32(message.server_count);
  writer.u32(message.shard_id);
  writer.u32(0);
  writer.u64(message.last_sequence);
  writer.text(message.host);
  return writer.finish();
}

Hello decode_hello(std::span<const uint8_t> payload) {
  Reader reader(payload);
  Hello message;
  message.trainer_count = reader.u32();
  message.server_count = reader.u32();
  message.shard_id = reader.u32();
  skip_zero(&reader);
  message.last_sequence = reader.u64();
  message.host = reader.text(kHostBytesMax);
  reader.expect_end();
  return message;
}

Buffer encode(const ErrorReply& message) {
  Writer writer;
  writer.u32(static_cast<uint32_t>(message.code));
  writer.u32(0);
  // An error is for people: a long one is cut rather than lost.
  if (message.message.size() > kErrorBytesMax) {
    writer.text(message.message.substr(0, kErrorBytesMax - 4) + " ...");
  } else {
    writer.text(message.message);
  }
  return writer.finish();
}

ErrorReply decode_error(std::span<const uint8_t> payload) {
  Reader reader(payload);
  ErrorReply message;
  const uint32_t code = reader.u32();
  if (code < static_cast<uint32_t>(ErrorCode::kInternal) || code > kErrorCodeLast) {
    refuse("unknown error code " + std::to_string(code));
  }
  message.code = static_cast<ErrorCode>(code);
  skip_zero(&reader);
  message.message = reader.text(kErrorBytesMax);
  reader.expect_end();
  return message;
}

Buffer encode(const ProbeReply& message) {
  Writer writer;
  writer.u32(message.known ? 1 : 0);
  writer.u32(static_cast<uint32_t>(message.waiting_for.size()));
  writer.bytes(message.waiting_for.data(), message.waiting_for.size() * sizeof(uint32_t));
  return writer.finish();
}

ProbeReply decode_probe_reply(std::span<const uint8_t> payload) {
  Reader reader(payload);
  ProbeReply message;
  message.known = flag(reader.u32(), "probe reply");
  const auto ranks = reader.array<uint32_t>(reader.u32());
  message.waiting_for.assign(ranks.begin(), ranks.end());
  reader.expect_end();
  return message;
}

Buffer encode(const PushNorm& message) {
  Writer writer;
  writer.u64(message.round);
  writer.f64(message.squared_norm);
  return writer.finish();
}

PushNorm decode_push_norm(std::span<const uint8_t> payload) {
  Reader reader(payload);
  PushNorm message;
  message.round = reader.u64();
  message.squared_norm = norm(reader.f64(), "squared norm");
  reader.expect_end();
  return message;
}

Buffer encode(const Commit& message) {
  Writer writer;
  writer.u64(message.round);
  writer.f64(message.total_norm);
  return writer.finish();
}

Commit decode_commit(std::span<const uint8_t> payload) {
  Reader reader(payload);
  Commit message;
  message.round = reader.u64();
  message.total_norm = norm(reader.f64(), "total norm");
  reader.expect_end();
  return message;
}

Buffer encode(const Join& message) {
  Writer writer;
  writer.u32(static_cast<uint32_t>(message.step));
  writer.u32(0);
  writer.u64(message.round);
  return writer.finish();
}

Join decode_join(std::span<const uint8_t> payload) {
  Reader reader(payload);
  Join message;
  const uint32_t step = reader.u32();
  if (step > static_cast<uint32_t>(JoinStep::kRelease)) {
    refuse("unknown join step " + std::to_string(step));
  }
  message.step = static_cast<JoinStep>(step);
  skip_zero(&reader);
  message.round = reader.u64();
  reader.expect_end();
  return message;
}

Buffer encode(const RoundReply& message) {
  Writer writer;
  writer.u64(message.round);
  writer.u64(message.ready ? 1 : 0);
  return writer.finish();
}

RoundReply decode_round_reply(std::span<const uint8_t> payload) {
  Reader reader(payload);
  RoundReply message;
  message.round = reader.u64();
  const uint64_t ready = reader.u64();
  if (ready > 1) refuse("a round reply with unknown flags");
  message.ready = ready == 1;
  reader.expect_end();
  return message;
}

Buffer encode(const BarrierReply& message) {
  Writer writer;
  writer.u64(message.rounds.size());
  for (const auto& [param_set, round] : message.rounds) {
    writer.u32(param_set);
    writer.u32(0);
    writer.u64(round);
  }
  return writer.finish();
}

BarrierReply decode_barrier_reply(std::span<const uint8_t> payload) {
  Reader reader(payload);
  BarrierReply message;
  const uint64_t count = reader.u64();
  check_count(reader, count, 16, "parameter sets");
  message.rounds.reserve(static_cast<size_t>(count));
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t param_set = reader.u32();
    skip_zero(&reader);
    message.rounds.emplace_back(param_set, reader.u64());
  }
  reader.expect_end();
  return message;
}

Buffer encode(const FetchRequest& message) {
  Writer writer;
  writer.u32(message.blocks ? 1 : 0);
  writer.u32(message.parameter);
  writer.u32(message.table);
  writer.u32(0);
  writer.u64(message.keys.size());
  writer.bytes(message.keys.data(), message.keys.size_bytes());
  return writer.finish();
}

FetchRequest decode_fetch(std::span<const uint8_t> payload) {
  Reader reader(payload);
  FetchRequest message;
  message.blocks = flag(reader.u32(), "fetch request");
  message.parameter = reader.u32();
  message.table = reader.u32();
  skip_zero(&reader);
  const uint64_t count = reader.u64();
  message.keys = reader.array<int64_t>(count);
  reader.expect_end();
  return message;
}

}  // namespace cpudist::wire
