// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one class
//
// Callbacks send without the lock of the links: in-process, a send calls back
// in the same thread.
#include "transport/peer_links.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/threads.h"
#include "transport/liveness.h"
#include "transport/retry.h"

namespace cpudist::transport {

using std::chrono::milliseconds;
using wire::FrameKind;

namespace {

constexpr auto kLookAgain = milliseconds(20);
// Attempts to connect that have taken so long: then others have their heartbeats.
constexpr auto kLongAttempts = milliseconds(100);

}  // namespace

PeerLinks::PeerLinks(PeerLinksOptions options, PeerLinksUser* user)
    : options_(std::move(options)), user_(user), peers_(options_.peers) {}

void PeerLinks::connect(std::vector<std::vector<std::string>> addresses,
                        std::unique_ptr<Listener> listener, std::shared_ptr<Connector> connector) {
  const std::lock_guard lock(mutex_);
  listener_ = std::move(listener);
  connector_ = std::move(connector);
  const TimePoint now = Clock::now();
  for (uint32_t rank = 0; rank < options_.peers; ++rank) {
    Outgoing& out = peers_[rank].out;
    out.addresses = std::move(addresses[rank]);
    out.give_up = now + milliseconds(options_.connect_deadline_ms);
    out.try_next = now;
  }
  thread_ = start_io_thread("the thread of links between trainers", [this] { keep(); });
}

LinkState PeerLinks::state(uint32_t rank) const {
  const Outgoing& out = peers_[rank].out;
  return {out.ever_open, !out.connection, out.unreachable, out.pending.size(), out.acknowledged};
}

std::string PeerLinks::describe(uint32_t rank) const {
  const Peer& peer = peers_[rank];
  std::string text = "trainer " + std::to_string(rank);
  const std::string address = peer.out.addresses.empty() ? "" : peer.out.addresses.back();
  if (peer.host.empty() && address.empty()) return text;
  return text + " (" + peer.host + (peer.host.empty() ? "" : ", ") + address + ")";
}

wire::Frame PeerLinks::frame_of(FrameKind kind, uint64_t sequence, Buffer payload) const {
  wire::FrameHeader header = options_.header;
  header.kind = kind;
  header.sequence = sequence;
  return {header, std::move(payload)};
}

void PeerLinks::fail(const Error& error) {
  if (!failure_) failure_ = error;
  changed_.notify_all();
}

uint64_t PeerLinks::push(uint32_t to, FrameKind kind, Buffer payload) {
  Peer& peer = peers_[to];
  const std::lock_guard order(peer.sending);
  Lock lock(mutex_);
  Outgoing& out = peer.out;
  const uint64_t sequence = ++out.last_sequence;
  Buffer copy = payload.share();
  out.pending.push_back({kind, sequence, std::move(payload)});
  out.sent = Clock::now();
  const ConnectionPtr connection = out.open && !out.resend ? out.connection : nullptr;
  lock.unlock();
  if (connection) connection->send(frame_of(kind, sequence, std::move(copy)));
  return sequence;
}

void PeerLinks::close(bool needed) {
  std::vector<ConnectionPtr> told;
  std::string why = "it was closed before its end";
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    if (failure_) why = failure_->what();
    for (const Peer& peer : peers_) {
      if (needed && peer.out.connection) told.push_back(peer.out.connection);
    }
    work_.notify_all();
    changed_.notify_all();
  }
  if (connector_) connector_->stop_attempts();  // the thread may be at one
  if (thread_.joinable()) join_thread(thread_);
  for (const ConnectionPtr& connection : told) {
    connection->send(user_->refusal(Error(ErrorCode::kPeerLost, why)));
  }
  if (connector_) connector_->stop();
  if (listener_) listener_->stop();
  const std::lock_guard lock(mutex_);
  for (Peer& peer : peers_) {
    peer.out.connection.reset();
    peer.incoming.reset();
  }
}

// -- what arrives

std::optional<uint32_t> PeerLinks::outgoing_rank(const Connection* connection) const {
  for (uint32_t rank = 0; rank < options_.peers; ++rank) {
    if (peers_[rank].out.connection.get() == connection) return rank;
  }
  return std::nullopt;
}

void PeerLinks::on_frame(const ConnectionPtr& connection, wire::Frame frame) {
  Lock lock(mutex_);
  if (closed_) return;
  if (const auto rank = outgoing_rank(connection.get())) {
    lock.unlock();
    on_reply(*rank, frame);
    return;
  }
  const auto found = incoming_.find(connection.get());
  const auto rank = found == incoming_.end() ? std::nullopt : std::optional(found->second);
  if (rank) peers_[*rank].heard = Clock::now();
  lock.unlock();
  if (frame.header.kind == FrameKind::kHello) return greet(connection, frame);
  if (!rank) throw Error(ErrorCode::kProtocol, options_.name + ": a frame before the hello");
  if (frame.header.kind == FrameKind::kHeartbeat) {
    connection->send(frame_of(FrameKind::kHeartbeatAck));
  } else if (frame.header.kind == FrameKind::kError) {
    const Error told = user_->refused(frame);
    lock.lock();
    fail(Error(ErrorCode::kPeerLost, describe(*rank) + " gave up: " + told.what()));
  } else if (frame.header.sequence != 0) {
    take(*rank, connection, frame);
  } else {
    throw Error(ErrorCode::kProtocol, options_.name + ": a frame of another kind");
  }
}

// Over the connection that this trainer made.
void PeerLinks::on_reply(uint32_t rank, const wire::Frame& frame) {
  const FrameKind kind = frame.header.kind;
  std::optional<Error> refused;
  if (kind == FrameKind::kError) refused = user_->refused(frame);
  PeerLinksUser::Greeting answer;
  if (kind == FrameKind::kHello) answer = user_->answered(frame);
  const std::lock_guard lock(mutex_);
  // Of a link that was open once: a stranger has the peer's port for now. Another attempt follows.
  const bool strange = refused && refused->code() == ErrorCode::kAuthentication;
  if (strange && peers_[rank].out.ever_open) throw Error(*refused);
  if (refused) return fail(Error(refused->code(), describe(rank) + " refuses: " + refused->what()));
  Peer& peer = peers_[rank];
  Outgoing& out = peer.out;
  peer.heard = Clock::now();
  if (kind == FrameKind::kHeartbeatAck) return;
  if (kind == options_.acknowledgement) return acknowledge(out, frame.header.sequence);
  if (kind != FrameKind::kHello) {
    throw Error(ErrorCode::kProtocol, options_.name + ": a reply of another kind");
  }
  if (answer.rank != rank) {
    return fail(Error(ErrorCode::kConfigMismatch,
                      describe(rank) + " is trainer " + std::to_string(answer.rank) +
                          "; the addresses of the " + options_.name + " are mixed up"));
  }
  acknowledge(out, answer.taken);
  peer.host = answer.host;
  if (out.open) return;  // a hello that came twice
  out.open = out.ever_open = out.resend = true;
  out.unreachable = false;
  work_.notify_all();
  changed_.notify_all();
}

void PeerLinks::acknowledge(Outgoing& out, uint64_t sequence) {
  if (sequence > out.last_sequence) {
    throw Error(ErrorCode::kProtocol, options_.name + ": frame " + std::to_string(sequence) +
                                          " is acknowledged, the last one sent is " +
                                          std::to_string(out.last_sequence));
  }
  out.acknowledged = std::max(out.acknowledged, sequence);
  while (!out.pending.empty() && out.pending.front().sequence <= sequence) out.pending.pop_front();
  changed_.notify_all();
}

void PeerLinks::greet(const ConnectionPtr& connection, const wire::Frame& frame) {
  PeerLinksUser::Greeting from;
  try {
    from = user_->greeted(frame);
  } catch (const Error& error) {
    connection->send(user_->refusal(error));
    throw Error(ErrorCode::kProtocol, options_.name + ": a hello was refused: " + error.what());
  }
  Peer& peer = peers_[from.rank];
  uint64_t taken = 0;
  {
    const std::lock_guard order(peer.taking);
    taken = peer.taken;
  }
  {
    const std::lock_guard lock(mutex_);
    incoming_[connection.get()] = from.rank;
    peer.incoming = connection;
    peer.seen_bytes = 0;
    peer.heard = Clock::now();
    peer.host = from.host;
  }
  connection->send(user_->hello(options_.rank, taken));
}

void PeerLinks::take(uint32_t rank, const ConnectionPtr& connection, const wire::Frame& frame) {
  Peer& peer = peers_[rank];
  uint64_t taken = 0;
  try {
    const std::lock_guard order(peer.taking);
    // Others are duplicates, or come before one that was lost and will come
    // again.
    if (frame.header.sequence == peer.taken + 1) {
      user_->take(rank, frame);
      ++peer.taken;
      const std::lock_guard lock(mutex_);
      changed_.notify_all();
    }
    taken = peer.taken;
  } catch (const Error& error) {
    {
      const std::lock_guard lock(mutex_);
      fail(Error(error.code(), describe(rank) + " sent " + options_.misfit + ": " + error.what()));
    }
    connection->send(user_->refusal(error));
    return;
  } catch (const std::exception& error) {
    // Part of the frame may be stored: it must not be taken a second time.
    const Error failure(ErrorCode::kInternal, options_.name + ": a frame of " + describe(rank) +
                                                  " could not be taken: " + error.what());
    {
      const std::lock_guard lock(mutex_);
      fail(failure);
    }
    connection->send(user_->refusal(failure));
    return;
  }
  connection->send(frame_of(options_.acknowledgement, taken));
}

void PeerLinks::on_close(const ConnectionPtr& connection, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (incoming_.erase(connection.get()) > 0) {
    for (Peer& peer : peers_) {
      if (peer.incoming == connection) peer.incoming.reset();
    }
  }
  const auto rank = outgoing_rank(connection.get());
  if (!rank) return;
  Outgoing& out = peers_[*rank].out;
  out.connection.reset();
  const TimePoint now = Clock::now();
  if (out.open) out.give_up = now + milliseconds(options_.liveness_ms);
  // Who was not let in comes again a little later.
  out.try_next = out.open ? now : now + pause_of(*rank);
  out.open = false;
  work_.notify_all();
  changed_.notify_all();
  out.trouble = reason;  // last: there may be no memory for it
}

// -- the thread that keeps the links

void PeerLinks::keep() {
  const auto interval = beat_interval(options_.liveness_ms);
  const auto look = std::min<milliseconds>(look_interval(options_.liveness_ms), kLookAgain);
  Lock lock(mutex_);
  Attendance attendance(options_.liveness_ms);
  TimePoint next_beat = Clock::now() + interval;
  while (!closed_) {
    const TimePoint now = Clock::now();
    const bool was_away = attendance.was_away(now);
    const bool beat = now >= next_beat;
    if (beat) next_beat = now + interval;
    for (uint32_t rank = 0; rank < options_.peers && !closed_; ++rank) {
      if (rank == options_.rank) continue;
      if (was_away) peers_[rank].heard = std::max(peers_[rank].heard, now);
      if (!peers_[rank].out.open) peers_[rank].out.give_up += attendance.missed();
      try {
        look_after(rank, lock, beat);
      } catch (const std::exception&) {
        // There is no memory. What was to be done is still to be done, at the next look.
        if (!lock.owns_lock()) lock.lock();
      }
    }
    const bool all = reach_some(lock);
    attendance.stay(Clock::now());  // an attempt to connect takes its time
    if (!closed_ && all) work_.wait_for(lock, look);
  }
}

// Those that are due, from where it ended the last time. False if there may be more: a peer that is
// frozen takes its time, and no other may wait for its heartbeats meanwhile.
bool PeerLinks::reach_some(Lock& lock) {
  const TimePoint begun = Clock::now();
  for (uint32_t i = 0; i < options_.peers; ++i) {
    const uint32_t rank = next_reached_;
    next_reached_ = (next_reached_ + 1) % options_.peers;
    const Outgoing& out = peers_[rank].out;
    if (closed_ || failure_) return true;
    if (rank == options_.rank || out.connection || Clock::now() < out.try_next) continue;
    if (settled(rank)) continue;
    try {
      reach(rank, lock);
    } catch (const std::exception&) {
      // There is no memory. What was to be done is still to be done, at the next look.
      if (!lock.owns_lock()) lock.lock();
    }
    if (Clock::now() - begun > kLongAttempts) return false;
  }
  return true;
}

void PeerLinks::look_after(uint32_t rank, Lock& lock, bool beat) {
  Peer& peer = peers_[rank];
  Outgoing& out = peer.out;
  const TimePoint now = Clock::now();
  if (failure_ || settled(rank)) return;
  if (!out.open && now >= out.give_up) {
    const std::string why = out.trouble.empty() ? "it does not answer a hello" : out.trouble;
    return fail(
        Error(out.ever_open ? ErrorCode::kPeerLost : ErrorCode::kAddress,
              describe(rank) + (out.ever_open ? " was lost: " : " is not reached: ") + why));
  }
  if (!out.connection) return;
  const ConnectionPtr connection = out.connection;
  const bool due = !connection->reliable() && now - out.sent > milliseconds(options_.resend_ms);
  if (!out.open) {
    if (!due) return;
    out.sent = now;
    lock.unlock();
    connection->send(user_->hello(rank, 0));
    lock.lock();
    return;
  }
  const bool gives = peer.incoming && has_moved(*peer.incoming, peer.seen_bytes);
  const bool takes = has_moved(*connection, out.seen_bytes);
  if (gives || takes) peer.heard = now;
  if (now - peer.heard > milliseconds(options_.liveness_ms)) {
    return fail(Error(ErrorCode::kPeerLost, describe(rank) + " was lost: silent for " +
                                                std::to_string(options_.liveness_ms) +
                                                " ms (CPUDIST_LIVENESS_MS)"));
  }
  if (out.resend || (due && !out.pending.empty())) send_pending(rank, lock);
  if (!beat) return;
  lock.unlock();
  connection->send(frame_of(FrameKind::kHeartbeat));
  lock.lock();
}

void PeerLinks::reach(uint32_t rank, Lock& lock) {
  Outgoing& out = peers_[rank].out;
  // Others get their turn, and their heartbeats, in between.
  const TimePoint deadline =
      std::min(out.give_up, Clock::now() + beat_interval(options_.liveness_ms));
  const std::vector<std::string> addresses = out.addresses;
  ConnectionPtr connection;
  std::string trouble = "it has no address";
  bool strange = false;
  lock.unlock();
  for (const std::string& address : addresses) {
    try {
      connection = connector_->connect(address, deadline);
      break;
    } catch (const Error& error) {
      trouble = error.what();
      strange = error.code() == ErrorCode::kAuthentication;
      if (strange) break;  // it is the cause, whatever others say
    }
  }
  lock.lock();
  const TimePoint now = Clock::now();
  if (!connection) {
    if (strange && !out.ever_open) {
      fail(Error(ErrorCode::kAuthentication,
                 options_.name + ": " + describe(rank) + " at " + trouble));
    }
    out.trouble.swap(trouble);
    out.unreachable = true;
    out.try_next = now + pause_of(rank);
    changed_.notify_all();
    return;
  }
  out.connection = connection;
  out.seen_bytes = 0;
  out.sent = peers_[rank].heard = now;
  lock.unlock();
  bool dead = false;
  try {
    connection->send(user_->hello(rank, 0));
    dead = connection->closed();
  } catch (const std::exception&) {
    dead = true;  // nobody repeats a hello over a reliable link: another one is made
  }
  lock.lock();
  // on_close may have come before the connection was known here.
  if (!dead || out.connection != connection) return;
  out.connection.reset();
  out.open = false;
  out.try_next = now + pause_of(rank);
}

milliseconds PeerLinks::pause_of(uint32_t rank) {
  return retry_pause(options_.rank, rank, ++peers_[rank].out.attempts);
}

// Everything from the first frame on that is not acknowledged, in order.
void PeerLinks::send_pending(uint32_t rank, Lock& lock) {
  Peer& peer = peers_[rank];
  lock.unlock();
  const std::lock_guard order(peer.sending);
  std::vector<wire::Frame> frames;
  lock.lock();
  const ConnectionPtr connection = peer.out.connection;
  for (const Pending& pending : peer.out.pending) {
    frames.push_back(frame_of(pending.kind, pending.sequence, pending.payload.share()));
  }
  peer.out.resend = false;
  peer.out.sent = Clock::now();
  lock.unlock();
  try {
    for (wire::Frame& frame : frames) {
      if (connection) connection->send(std::move(frame));
    }
  } catch (const std::exception&) {
    lock.lock();
    peer.out.resend = true;  // all of them: whoever takes them knows which it has
    throw;
  }
  lock.lock();
}

}  // namespace cpudist::transport
