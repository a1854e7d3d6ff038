// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The shuffle's own thread: connects, says hello, beats, notices silence, replaces broken links and
// sends again.
#include <algorithm>
#include <utility>

#include "data/shuffle/impl.h"

namespace cpudist::data {

using std::chrono::milliseconds;
using wire::FrameKind;

namespace {

constexpr auto kRetryPause = milliseconds(20);
constexpr uint64_t kBeatsPerLiveness = 5;
constexpr uint64_t kLooksPerLiveness = 20;

milliseconds part_of(uint64_t liveness_ms, uint64_t parts) {
  return milliseconds(std::max<uint64_t>(liveness_ms / parts, 1));
}

}  // namespace

wire::FrameHeader ShuffleExchange::Impl::header(wire::FrameKind kind, uint64_t sequence) const {
  wire::FrameHeader made;
  made.kind = kind;
  made.run_id = options.run_id;
  made.epoch = options.epoch;
  made.role = wire::Role::kTrainer;
  made.rank = static_cast<uint16_t>(options.rank);
  made.param_set = wire::kNoParamSet;
  made.sequence = sequence;
  return made;
}

wire::Frame ShuffleExchange::Impl::hello(uint32_t to, uint64_t last_sequence) const {
  wire::Hello message;
  message.trainer_count = options.trainers;
  message.shard_id = to;
  message.last_sequence = last_sequence;
  message.host = options.host;
  return wire::Frame{header(wire::FrameKind::kHello), wire::encode(message)};
}

std::string ShuffleExchange::Impl::describe(uint32_t rank) const {
  const Peer& peer = peers[rank];
  std::string text = "trainer " + std::to_string(rank);
  const std::string& address = peer.out.addresses.empty() ? "" : peer.out.addresses.back();
  if (peer.host.empty() && address.empty()) return text;
  return text + " (" + peer.host + (peer.host.empty() ? "" : ", ") + address + ")";
}

void ShuffleExchange::Impl::fail(const Error& error) {
  if (!failure) failure = error;
  changed.notify_all();
}

// Nothing is due to this trainer nor to the peer: both know it, or the peer, which has everything,
// went without a word that arrived.
bool ShuffleExchange::Impl::settled(const Peer& peer) const {
  const Outgoing& out = peer.out;
  if (out.done_sequence == 0 || !peer.in.ended) return false;
  const bool broken = !out.connection;
  if (peer.in.done) return broken || out.acknowledged >= out.done_sequence;
  return broken && out.unreachable;
}

void ShuffleExchange::Impl::note_life(Peer& peer, TimePoint now) {
  const auto grown = [](const ConnectionPtr& connection, uint64_t& seen) {
    if (!connection) return false;
    return std::exchange(seen, connection->bytes_moved()) != seen;
  };
  const bool sends = grown(peer.in.connection, peer.in.bytes_seen);
  const bool takes = grown(peer.out.connection, peer.out.bytes_seen);
  if (sends || takes) peer.heard = now;
}

void ShuffleExchange::Impl::monitor() {
  const auto interval = part_of(options.liveness_ms, kBeatsPerLiveness);
  const auto look = part_of(options.liveness_ms, kLooksPerLiveness);
  std::unique_lock lock(mutex);
  TimePoint last = Clock::now();
  TimePoint next_beat = last + interval;
  while (!stopping) {
    const TimePoint now = Clock::now();
    // A process that was stopped itself has heard nobody; that is not the others' silence.
    const bool was_away = now - last > 3 * interval;
    last = now;
    const bool beat = now >= next_beat;
    if (beat) next_beat = now + interval;
    for (uint32_t rank = 0; rank < options.trainers && !stopping; ++rank) {
      if (!is_peer(rank)) continue;
      if (was_away) peers[rank].heard = std::max(peers[rank].heard, now);
      look_after(rank, lock, beat);
    }
    // An attempt to connect takes its time; that was no absence.
    last = Clock::now();
    if (!stopping) work.wait_for(lock, std::min<milliseconds>(look, kRetryPause));
  }
}

void ShuffleExchange::Impl::look_after(uint32_t rank, std::unique_lock<std::mutex>& lock,
                                       bool beat) {
  Peer& peer = peers[rank];
  Outgoing& out = peer.out;
  const TimePoint now = Clock::now();
  if (failure || settled(peer)) return;
  if (!out.open && now >= out.give_up) {
    const std::string why = out.trouble.empty() ? "it does not answer a hello" : out.trouble;
    return fail(
        Error(out.ever_open ? ErrorCode::kPeerLost : ErrorCode::kAddress,
              describe(rank) + (out.ever_open ? " was lost: " : " is not reached: ") + why));
  }
  if (!out.connection) {
    if (now >= out.try_next) reach(rank, lock);
    return;
  }
  const ConnectionPtr connection = out.connection;
  const bool due = !connection->reliable() && now - out.sent > milliseconds(options.resend_ms);
  if (!out.open) {
    if (!due) return;
    out.sent = now;
    lock.unlock();
    connection->send(hello(rank, 0));
    lock.lock();
    return;
  }
  note_life(peer, now);
  if (now - peer.heard > milliseconds(options.liveness_ms)) {
    return fail(Error(ErrorCode::kPeerLost, describe(rank) + " was lost: silent for " +
                                                std::to_string(options.liveness_ms) +
                                                " ms (CPUDIST_LIVENESS_MS)"));
  }
  if (out.resend || (due && !out.pending.empty())) send_pending(rank, lock);
  if (!beat) return;
  lock.unlock();
  connection->send(wire::Frame{header(wire::FrameKind::kHeartbeat), Buffer()});
  lock.lock();
}

void ShuffleExchange::Impl::reach(uint32_t rank, std::unique_lock<std::mutex>& lock) {
  Outgoing& out = peers[rank].out;
  // Others get their turn, and their heartbeats, in between.
  const TimePoint deadline =
      std::min(out.give_up, Clock::now() + part_of(options.liveness_ms, kBeatsPerLiveness));
  const std::vector<std::string> addresses = out.addresses;
  ConnectionPtr connection;
  std::string trouble = "it has no address";
  lock.unlock();
  for (const std::string& address : addresses) {
    try {
      connection = connector->connect(address, deadline);
      break;
    } catch (const Error& error) {
      trouble = error.what();
    }
  }
  lock.lock();
  const TimePoint now = Clock::now();
  if (!connection) {
    out.trouble = trouble;
    out.unreachable = true;
    out.try_next = now + kRetryPause;
    changed.notify_all();
    return;
  }
  out.connection = connection;
  out.bytes_seen = 0;
  out.sent = peers[rank].heard = now;
  lock.unlock();
  connection->send(hello(rank, 0));
  const bool dead = connection->closed();
  lock.lock();
  // on_close may have come before the connection was known here.
  if (!dead || out.connection != connection) return;
  out.connection.reset();
  out.open = false;
  out.try_next = now + kRetryPause;
}

// Everything from the first frame on that is not acknowledged, in order.
void ShuffleExchange::Impl::send_pending(uint32_t rank, std::unique_lock<std::mutex>& lock) {
  Peer& peer = peers[rank];
  lock.unlock();
  const std::lock_guard order(peer.sending);
  std::vector<wire::Frame> frames;
  lock.lock();
  const ConnectionPtr connection = peer.out.connection;
  peer.out.resend = false;
  peer.out.sent = Clock::now();
  for (const Pending& pending : peer.out.pending) {
    frames.push_back({header(pending.kind, pending.sequence), pending.payload.share()});
  }
  lock.unlock();
  for (wire::Frame& frame : frames) {
    if (connection) connection->send(std::move(frame));
  }
  lock.lock();
}

}  // namespace cpudist::data
