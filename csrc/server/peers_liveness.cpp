// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Who is lost, and when a server is done.

#include <algorithm>
#include <cstdio>
#include <utility>

#include "server/peers.h"

namespace cpudist::server {
namespace {

// Bytes count as heard when they are noticed: the time between two looks is added to a silence.
constexpr uint64_t kLooksPerLiveness = 20;
constexpr uint64_t kLooksMissedWhenAway = 12;

std::string seconds(uint64_t milliseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(milliseconds) / 1000.0);
  return text;
}

}  // namespace

TimePoint Peers::given_up_at(const Peer& peer) const {
  return peer.lost_at + std::chrono::milliseconds(options_.rejoin_ms);
}

bool Peers::wait_done(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  while (true) {
    bool done = true;
    TimePoint look = deadline;
    for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
      const Peer& peer = peers_[rank];
      if (!peer.lost.empty() && !options_.elastic) throw Error(ErrorCode::kPeerLost, peer.lost);
      const TimePoint given_up = given_up_at(peer);
      const bool away = !peer.lost.empty() && Clock::now() >= given_up;
      if (!peer.lost.empty() && !away) look = std::min(look, given_up);
      done = done && (peer.gone || away || !expected(rank));
    }
    if (done) return true;
    if (stopped_) throw Error(ErrorCode::kClosed, "the server was stopped before every goodbye");
    if (Clock::now() >= deadline) return false;
    changed_.wait_until(lock, look);
  }
}

std::optional<TimePoint> Peers::overdue_at(const Peer& peer, std::string* why) const {
  using std::chrono::milliseconds;
  if (peer.goodbye || !peer.lost.empty()) return std::nullopt;
  if (!peer.seen) {
    *why = "never connected within " + seconds(options_.join_deadline_ms);
    return started_ + milliseconds(options_.join_deadline_ms);
  }
  if (!peer.connection) {
    *why = "connection closed and not replaced within " + seconds(options_.reconnect_grace_ms);
    if (!peer.ended.empty()) *why += ": " + peer.ended;
    return peer.broken + milliseconds(options_.reconnect_grace_ms);
  }
  *why = "silent for " + seconds(options_.liveness_ms);
  return peer.heard + milliseconds(options_.liveness_ms);
}

void Peers::note_signs_of_life(TimePoint now, bool was_away) {
  for (Peer& peer : peers_) {
    if (!peer.connection) continue;
    const uint64_t bytes = peer.connection->bytes_moved();
    if (was_away || bytes != peer.bytes_seen) peer.heard = std::max(peer.heard, now);
    peer.bytes_seen = bytes;
  }
}

std::optional<Peers::Loss> Peers::wait_for_loss() {
  const auto interval =
      std::chrono::milliseconds(std::max<uint64_t>(options_.liveness_ms / kLooksPerLiveness, 1));
  std::unique_lock lock(mutex_);
  TimePoint looked = Clock::now();
  while (!stopped_) {
    const TimePoint now = Clock::now();
    // A process that was stopped itself has heard nobody; that is not the trainers' silence.
    note_signs_of_life(now, now - looked > kLooksMissedWhenAway * interval);
    looked = now;
    std::optional<TimePoint> next;
    for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
      Peer& peer = peers_[rank];
      std::string why;
      if (!expected(rank)) continue;
      const auto at = overdue_at(peer, &why);
      if (!at) continue;
      if (*at <= Clock::now()) {
        peer.lost = describe(rank) + " was lost: " + why;
        peer.lost_at = Clock::now();
        // What it left half done is not to happen once the others go on without it.
        if (options_.elastic) peer.received.reset();
        changed_.notify_all();
        return Loss{rank, Error(ErrorCode::kPeerLost, peer.lost), peer.connection};
      }
      if (!next || *at < *next) next = at;
    }
    const TimePoint look = now + interval;
    changed_.wait_until(lock, next ? std::min(*next, look) : look);
  }
  return std::nullopt;
}

}  // namespace cpudist::server
