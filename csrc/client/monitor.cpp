// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The client's own thread: connects, says hello, sends heartbeats, notices silence, replaces broken
// links. It never touches requests beyond marking them.
#include <algorithm>
#include <optional>
#include <utility>

#include "client/session.h"

namespace cpudist::client {

namespace {

using std::chrono::milliseconds;

// One attempt to reach a server that has not answered yet; others get their turn in between.
constexpr auto kFirstAttempt = milliseconds(2000);
constexpr auto kRetryPause = milliseconds(20);
constexpr uint64_t kBeatsPerLiveness = 5;
// Bytes count as heard when they are noticed: the time between two looks is added to a silence.
constexpr uint64_t kLooksPerLiveness = 20;

milliseconds beat_interval(const ClientOptions& options) {
  return milliseconds(std::max<uint64_t>(options.liveness_ms / kBeatsPerLiveness, 1));
}

}  // namespace

void Session::connect() {
  std::unique_lock lock(mutex_);
  throw_failure();
  if (started_) throw Error(ErrorCode::kInvalidArgument, "client: connect() was called before");
  const TimePoint now = Clock::now();
  started_ = true;
  for (Link& link : links_) {
    link.give_up = now + milliseconds(options_.connect_deadline_ms);
    link.try_next = now;
  }
  beat_last_ = now;
  beat_next_ = now + beat_interval(options_);
  monitor_ = std::thread([this] { monitor(); });
  const auto all_open = [this] {
    return std::all_of(links_.begin(), links_.end(),
                       [](const Link& link) { return link.ever_open; });
  };
  while (!all_open()) {
    throw_failure();
    answered_.wait_for(lock, milliseconds(50));
    if (!options_.interrupted) continue;
    lock.unlock();
    const bool interrupted = options_.interrupted();
    lock.lock();
    if (interrupted) throw Error(ErrorCode::kInterrupted, "connect: interrupted by a signal");
  }
  throw_failure();
}

void Session::monitor() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    for (Link& link : links_) {
      if (failure_ || stopping_) break;
      const TimePoint now = Clock::now();
      const bool down = link.state == LinkState::kBroken || link.state == LinkState::kHandshake;
      if (down && now >= link.give_up) {
        lose(link, link.trouble.empty() ? "it does not answer a hello" : link.trouble);
      } else if (link.state == LinkState::kBroken && now >= link.try_next) {
        revive(link, lock);
      } else if (link.state == LinkState::kHandshake) {
        repeat_hello(link, lock, now);
      }
    }
    beat(lock, Clock::now());
    if (stopping_) break;
    changed_.wait_until(lock, next_wakeup(Clock::now()));
  }
}

TimePoint Session::next_wakeup(TimePoint now) const {
  const auto look = milliseconds(std::max<uint64_t>(options_.liveness_ms / kLooksPerLiveness, 1));
  TimePoint next = std::min(beat_next_, now + look);
  if (failure_) return next;
  for (const Link& link : links_) {
    if (link.state == LinkState::kOpen) {
      next = std::min(next, link.heard + milliseconds(options_.liveness_ms + 1));
    } else if (link.state == LinkState::kBroken) {
      next = std::min({next, link.try_next, link.give_up});
    } else if (link.state == LinkState::kHandshake) {
      next = std::min({next, link.give_up, now + kRetryPause});
    }
  }
  return next;
}

void Session::beat(std::unique_lock<std::mutex>& lock, TimePoint now) {
  const auto interval = beat_interval(options_);
  // A process that was stopped itself has heard nobody; that is not the servers' silence.
  const bool was_away = now - beat_last_ > 3 * interval;
  beat_last_ = now;
  const bool due = now >= beat_next_;
  if (due) beat_next_ = now + interval;
  std::vector<std::shared_ptr<transport::Connection>> connections;
  for (Link& link : links_) {
    if (link.state != LinkState::kOpen) continue;
    const uint64_t bytes = link.connection->bytes_moved();
    if (was_away || bytes != link.bytes_seen) link.heard = std::max(link.heard, now);
    link.bytes_seen = bytes;
    if (!failure_ && now - link.heard > milliseconds(options_.liveness_ms)) {
      lose(link,
           "silent for " + std::to_string(options_.liveness_ms) + " ms (CPUDIST_LIVENESS_MS)");
    } else if (due) {
      connections.push_back(link.connection);
    }
  }
  if (connections.empty()) return;
  lock.unlock();
  for (const auto& connection : connections) {
    connection->send(wire::Frame{make_header(wire::FrameKind::kHeartbeat), Buffer()});
  }
  lock.lock();
}

void Session::revive(Link& link, std::unique_lock<std::mutex>& lock) {
  const TimePoint deadline =
      link.ever_open ? link.give_up : std::min(link.give_up, Clock::now() + kFirstAttempt);
  std::shared_ptr<transport::Connection> connection;
  std::string trouble;
  std::string used;
  std::optional<ErrorCode> code;
  lock.unlock();
  for (const std::string& address : link.addresses) {  // fixed after construction
    try {
      connection = connector_->connect(address, deadline);
      used = address;
      break;
    } catch (const Error& error) {
      trouble = error.what();
      code = error.code();
    }
  }
  lock.lock();
  if (!connection) {
    link.trouble = trouble;
    link.gone = code == ErrorCode::kPeerLost || code == ErrorCode::kClosed;
    link.try_next = Clock::now() + kRetryPause;
    if (code == ErrorCode::kPeerLost && !stopping_ && !failure_) lose(link, trouble);
    // The rank has ended for good, maybe because of a loss that is to be named first.
    const auto grace = milliseconds(options_.reconnect_grace_ms);
    if (code == ErrorCode::kClosed) link.give_up = std::min(link.give_up, Clock::now() + grace);
    return;
  }
  if (stopping_ || failure_) {
    lock.unlock();
    connection->close("the client is closed");
    lock.lock();
    return;
  }
  link.connection = connection;
  link.address = used;
  link.state = LinkState::kHandshake;
  link.bytes_seen = 0;
  link.heard = link.hello_sent = Clock::now();
  wire::Frame hello = make_hello(link);
  lock.unlock();
  connection->send(std::move(hello));
  const bool dead = connection->closed();
  lock.lock();
  // on_close may have come before the link knew the connection.
  if (dead && link.connection == connection && link.state != LinkState::kClosed) {
    link.connection.reset();
    link.state = LinkState::kBroken;
    link.try_next = Clock::now() + kRetryPause;
  }
}

void Session::repeat_hello(Link& link, std::unique_lock<std::mutex>& lock, TimePoint now) {
  const auto pause =
      std::min(milliseconds(options_.resend_ms), milliseconds(options_.reconnect_grace_ms / 5 + 1));
  if (link.connection->reliable() || now - link.hello_sent < pause) return;
  link.hello_sent = now;
  const auto connection = link.connection;
  wire::Frame hello = make_hello(link);
  lock.unlock();
  connection->send(std::move(hello));
  lock.lock();
}

void Session::lose(Link& link, const std::string& why) {
  link.state = LinkState::kClosed;
  if (link.ever_open || link.gone) {
    fail(Error(ErrorCode::kPeerLost, describe(link) + " was lost: " + why));
    return;
  }
  fail(Error(ErrorCode::kAddress, describe(link) + " could not be reached within " +
                                      std::to_string(options_.connect_deadline_ms) +
                                      " ms: " + why));
}

void Session::on_close(const std::shared_ptr<transport::Connection>& connection,
                       const std::string& reason) {
  const std::lock_guard lock(mutex_);
  Link* link = find_link(connection.get());
  if (link == nullptr) return;
  link->closed_bytes_sent += connection->bytes_sent();
  link->closed_bytes_received += connection->bytes_received();
  link->connection.reset();
  if (link->state == LinkState::kClosed) return;
  const TimePoint now = Clock::now();
  if (link->state == LinkState::kOpen) {
    link->give_up = now + milliseconds(options_.reconnect_grace_ms);
  }
  link->state = LinkState::kBroken;
  link->trouble = reason;
  link->try_next = now;
  changed_.notify_all();
  answered_.notify_all();
}

}  // namespace cpudist::client
