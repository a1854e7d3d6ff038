// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What arrives at a shuffle: hellos, records, ends, acknowledgements, errors. Callbacks send
// without `mutex`, as in-process a send calls back in the same thread.
#include <algorithm>
#include <string>
#include <utility>

#include "data/shuffle/impl.h"
#include "wire/primitives.h"

namespace cpudist::data {

using wire::FrameKind;

namespace {

std::span<const uint8_t> bytes_of(const wire::Frame& frame) {
  return {frame.payload.data(), frame.payload.size()};
}

}  // namespace

std::optional<uint32_t> ShuffleExchange::Impl::outgoing_rank(
    const transport::Connection* connection) const {
  for (uint32_t rank = 0; rank < options.trainers; ++rank) {
    if (peers[rank].out.connection.get() == connection) return rank;
  }
  return std::nullopt;
}

void ShuffleExchange::Impl::on_frame(const ConnectionPtr& connection, wire::Frame frame) {
  std::unique_lock lock(mutex);
  if (closed) return;
  if (const auto rank = outgoing_rank(connection.get())) {
    lock.unlock();
    on_reply(*rank, frame);
    return;
  }
  const auto session = sessions.find(connection.get());
  const std::optional<uint32_t> rank =
      session == sessions.end() ? std::nullopt : std::optional(session->second);
  if (rank) peers[*rank].heard = Clock::now();
  lock.unlock();
  if (frame.header.kind == wire::FrameKind::kHello) return greet(connection, frame);
  if (!rank) throw Error(ErrorCode::kProtocol, "shuffle: a frame before the hello");
  switch (frame.header.kind) {
    case wire::FrameKind::kHeartbeat:
      connection->send(wire::Frame{header(wire::FrameKind::kHeartbeatAck), Buffer()});
      return;
    case wire::FrameKind::kShuffle:
    case wire::FrameKind::kShuffleEnd:
    case wire::FrameKind::kShuffleDone:
      return take(*rank, connection, frame);
    case wire::FrameKind::kError: {
      const wire::ErrorReply reply = wire::decode_error(bytes_of(frame));
      lock.lock();
      fail(Error(ErrorCode::kPeerLost, describe(*rank) + " gave up: " + reply.message));
      return;
    }
    default:
      throw Error(ErrorCode::kProtocol, "shuffle: a frame of another kind");
  }
}

// Over the connection that this trainer made.
void ShuffleExchange::Impl::on_reply(uint32_t rank, const wire::Frame& frame) {
  if (frame.header.kind == wire::FrameKind::kError) {
    const wire::ErrorReply reply = wire::decode_error(bytes_of(frame));
    const std::lock_guard lock(mutex);
    fail(Error(reply.code, describe(rank) + " refuses: " + reply.message));
    return;
  }
  wire::Hello answer;
  if (frame.header.kind == wire::FrameKind::kHello) answer = wire::decode_hello(bytes_of(frame));
  const std::lock_guard lock(mutex);
  Peer& peer = peers[rank];
  Outgoing& out = peer.out;
  peer.heard = Clock::now();
  switch (frame.header.kind) {
    case wire::FrameKind::kHeartbeatAck:
      return;
    case wire::FrameKind::kShuffleAck:
      return acknowledge(out, frame.header.sequence);
    case wire::FrameKind::kHello:
      if (answer.shard_id != rank) {
        fail(Error(ErrorCode::kConfigMismatch, describe(rank) + " is trainer " +
                                                   std::to_string(answer.shard_id) +
                                                   "; the addresses of the shuffle are mixed up"));
        return;
      }
      acknowledge(out, answer.last_sequence);
      peer.host = answer.host;
      if (out.open) return;  // a hello that came twice
      out.open = out.ever_open = out.resend = true;
      out.unreachable = false;
      work.notify_all();
      changed.notify_all();
      return;
    default:
      throw Error(ErrorCode::kProtocol, "shuffle: a reply of another kind");
  }
}

void ShuffleExchange::Impl::acknowledge(Outgoing& out, uint64_t sequence) {
  if (sequence > out.last_sequence) {
    throw Error(ErrorCode::kProtocol, "shuffle: frame " + std::to_string(sequence) +
                                          " is acknowledged, the last one sent is " +
                                          std::to_string(out.last_sequence));
  }
  out.acknowledged = std::max(out.acknowledged, sequence);
  while (!out.pending.empty() && out.pending.front().sequence <= sequence) out.pending.pop_front();
  changed.notify_all();
}

void ShuffleExchange::Impl::refuse(const ConnectionPtr& connection, const Error& error) {
  const wire::ErrorReply reply{error.code(), error.what()};
  connection->send(wire::Frame{header(wire::FrameKind::kError), wire::encode(reply)});
}

void ShuffleExchange::Impl::greet(const ConnectionPtr& connection, const wire::Frame& frame) {
  const wire::Hello hello_in = wire::decode_hello(bytes_of(frame));
  const wire::FrameHeader& from = frame.header;
  std::string wrong;
  if (from.run_id != options.run_id) wrong = "run id";
  if (from.epoch != options.epoch) wrong = "epoch of the shuffle";
  if (hello_in.trainer_count != options.trainers) wrong = "number of trainers";
  if (hello_in.shard_id != options.rank) wrong = "rank of the trainer at this address";
  if (from.rank >= options.trainers || !is_peer(from.rank)) wrong = "rank of the sender";
  if (!wrong.empty()) {
    refuse(connection, Error(ErrorCode::kConfigMismatch,
                             "the " + wrong + " of the hello is not that of trainer " +
                                 std::to_string(options.rank) +
                                 "; all trainers must shuffle the same data set at once"));
    throw Error(ErrorCode::kProtocol, "shuffle: a hello with another " + wrong);
  }
  Peer& peer = peers[from.rank];
  uint64_t taken = 0;
  {
    const std::lock_guard order(peer.taking);
    taken = peer.taken;
  }
  {
    const std::lock_guard lock(mutex);
    sessions[connection.get()] = from.rank;
    peer.in.connection = connection;
    peer.in.bytes_seen = 0;
    peer.heard = Clock::now();
    peer.host = hello_in.host;
  }
  connection->send(hello(options.rank, taken));
}

void ShuffleExchange::Impl::take(uint32_t rank, const ConnectionPtr& connection,
                                 const wire::Frame& frame) {
  Peer& peer = peers[rank];
  uint64_t taken = 0;
  try {
    const std::lock_guard order(peer.taking);
    // Others are duplicates, or come before one that was lost and will come again.
    if (frame.header.sequence == peer.taken + 1) take_next(rank, frame);
    taken = peer.taken;
  } catch (const Error& error) {
    {
      const std::lock_guard lock(mutex);
      fail(Error(error.code(),
                 describe(rank) + " sent what is no shuffle of these slots: " + error.what()));
    }
    refuse(connection, error);
    return;
  }
  connection->send(wire::Frame{header(wire::FrameKind::kShuffleAck, taken), Buffer()});
}

void ShuffleExchange::Impl::take_next(uint32_t rank, const wire::Frame& frame) {
  if (frame.header.kind == wire::FrameKind::kShuffle) {
    take_records(rank, frame);
  } else if (frame.header.kind == wire::FrameKind::kShuffleEnd) {
    take_end(rank, frame);
  }
  ++peers[rank].taken;
  const std::lock_guard lock(mutex);
  if (frame.header.kind == wire::FrameKind::kShuffleEnd) peers[rank].in.ended = true;
  if (frame.header.kind == wire::FrameKind::kShuffleDone) peers[rank].in.done = true;
  changed.notify_all();
}

void ShuffleExchange::Impl::take_records(uint32_t rank, const wire::Frame& frame) {
  const size_t size = frame.payload.size();
  if (size == 0 || size % sizeof(uint64_t) != 0) {
    throw Error(ErrorCode::kProtocol,
                "a frame of " + std::to_string(size) + " bytes; records are 8-byte words");
  }
  // Payloads are aligned to 64 bytes.
  const auto* first = reinterpret_cast<const uint64_t*>(frame.payload.data());
  const std::span<const uint64_t> words(first, size / sizeof(uint64_t));
  const size_t records = check_records(schema, words);
  for (size_t at = 0; at < words.size(); at += record_words(first + at)) {
    peers[rank].received.add(first + at);
  }
  sink(rank, words, records);
}

void ShuffleExchange::Impl::take_end(uint32_t rank, const wire::Frame& frame) {
  wire::Reader reader(bytes_of(frame));
  ShuffleTotals totals;
  totals.records = reader.u64();
  totals.words = reader.u64();
  totals.checksum = reader.u64();
  reader.expect_end();
  const ShuffleTotals& found = peers[rank].received;
  if (totals == found) return;
  throw Error(ErrorCode::kProtocol, "expected " + std::to_string(totals.records) +
                                        " records, checksum " + std::to_string(totals.checksum) +
                                        ", found " + std::to_string(found.records) + ", checksum " +
                                        std::to_string(found.checksum));
}

void ShuffleExchange::Impl::on_close(const ConnectionPtr& connection, const std::string& reason) {
  const std::lock_guard lock(mutex);
  if (sessions.erase(connection.get()) > 0) {
    for (Peer& peer : peers) {
      if (peer.in.connection == connection) peer.in.connection.reset();
    }
  }
  const auto rank = outgoing_rank(connection.get());
  if (!rank) return;
  Outgoing& out = peers[*rank].out;
  out.connection.reset();
  const TimePoint now = Clock::now();
  if (out.open) out.give_up = now + std::chrono::milliseconds(options.liveness_ms);
  out.open = false;
  out.trouble = reason;
  out.try_next = now;
  work.notify_all();
  changed.notify_all();
}

}  // namespace cpudist::data
