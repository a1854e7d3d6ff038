// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one class
//
// Hello and fencing, goodbye, and who is lost.

#include "server/peers.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/process_end.h"
#include "transport/liveness.h"

namespace cpudist::server {
namespace {

// Elastic: by how many the ids of trainers that are on their way may exceed those met so far. Jobs
// take ids in a row, and the last rank of one may connect first; a stranger's must not fill the
// memory.
constexpr size_t kRanksAhead = 1024;
// Elastic: how often a trainer may have been started while this server lives, and at first.
// Incarnations count starts: a stranger's is not far above them, and every one can be outbid.
constexpr uint64_t kStartsPerSecond = 16;
constexpr uint64_t kStartsAtFirst = 16;

// Elastic: of these many one is for a trainer that has come beyond those that were expected: a
// stranger may say to be ever another one, and a server that has none left cannot go on.
constexpr uint64_t kDescriptorsPerTrainer = 4;
constexpr uint64_t kDescriptorsUnknown = 1024;

Error count_mismatch(const char* variable, uint64_t found, uint64_t expected) {
  return Error(ErrorCode::kConfigMismatch, std::string(variable) + ": the trainer has " +
                                               std::to_string(found) + ", this server " +
                                               std::to_string(expected) +
                                               "; start all processes with the same layout");
}

std::string seconds(uint64_t milliseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(milliseconds) / 1000.0);
  return text;
}

}  // namespace

Peers::Peers(const ServerOptions& options, ServerCounters& counters, Sequencer& sequencer)
    : options_(options),
      counters_(counters),
      sequencer_(sequencer),
      started_(Clock::now()),
      more_trainers_(options.more_trainers != 0
                         ? options.more_trainers
                         : descriptors_max(kDescriptorsUnknown) / kDescriptorsPerTrainer),
      peers_(options.trainer_count) {}

void Peers::opened(const std::shared_ptr<transport::Connection>& connection) {
  const std::lock_guard lock(mutex_);
  sessions_.try_emplace(connection.get(), Session{connection, std::nullopt, 0, false});
}

void Peers::closed(const std::shared_ptr<transport::Connection>& connection) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(connection.get());
  if (found == sessions_.end()) return;
  closed_bytes_sent_ += connection->bytes_sent();
  closed_bytes_received_ += connection->bytes_received();
  if (found->second.rank) {
    Peer& peer = peers_[*found->second.rank];
    if (peer.connection == connection) {
      peer.connection.reset();
      peer.broken = Clock::now();
      sequencer_.unbind(*found->second.rank, connection);
    }
  }
  sessions_.erase(found);
  changed_.notify_all();
}

Error Peers::stopped_error() const {
  return Error(ErrorCode::kPeerLost, "server " + std::to_string(options_.shard_id) + " (" +
                                         options_.host +
                                         ") was stopped before every trainer had said goodbye" +
                                         (stop_reason_.empty() ? "" : ": " + stop_reason_));
}

std::optional<Error> Peers::refusal(const wire::FrameHeader& header,
                                    const wire::Hello& hello) const {
  if (stopped_) return stopped_error();
  if (header.run_id != options_.run_id) {
    return Error(ErrorCode::kProtocol, "hello of another run: run id " +
                                           std::to_string(header.run_id) + " is not this server's");
  }
  if (header.role != wire::Role::kTrainer) {
    return Error(ErrorCode::kProtocol, "hello of a server; only trainers connect to servers");
  }
  if (hello.trainer_count != options_.trainer_count) {
    return count_mismatch("number of trainers", hello.trainer_count, options_.trainer_count);
  }
  if (hello.server_count != options_.server_count) {
    return count_mismatch("number of servers", hello.server_count, options_.server_count);
  }
  if (hello.shard_id != options_.shard_id) {
    return count_mismatch("shard id of the server at this address", hello.shard_id,
                          options_.shard_id);
  }
  if (header.rank >= options_.trainer_count && !options_.elastic) {
    return Error(ErrorCode::kConfigMismatch, "trainer rank " + std::to_string(header.rank) +
                                                 " is not below the number of " + "trainers, " +
                                                 std::to_string(options_.trainer_count));
  }
  const uint64_t ids = options_.trainer_count + met_ + kRanksAhead;
  if (header.rank >= ids) {
    return Error(ErrorCode::kConfigMismatch,
                 "trainer rank " + std::to_string(header.rank) + ": expected one below " +
                     std::to_string(ids) +
                     ", as ids are issued one by one and this server has met " +
                     std::to_string(met_) + " trainers. Is it a trainer of another run?");
  }
  if (auto error = incarnation_refusal(header, hello)) return error;
  if (auto error = crowd_refusal(header.rank)) return error;
  if (header.rank >= peers_.size()) return std::nullopt;  // elastic: the first of its rank
  const Peer& peer = peers_[header.rank];
  const bool returns = options_.elastic && header.incarnation > peer.incarnation;
  if (!peer.lost.empty() && !returns && header.incarnation >= peer.incarnation) {
    return told_itself(peer.lost);
  }
  if (peer.seen && header.incarnation < peer.incarnation) {
    return Error(ErrorCode::kFenced, "trainer " + std::to_string(header.rank) + ": incarnation " +
                                         std::to_string(peer.incarnation) +
                                         " has taken over from this one, " +
                                         std::to_string(header.incarnation));
  }
  if (peer.goodbye && header.incarnation > peer.incarnation && !options_.elastic) {
    return Error(ErrorCode::kClosed,
                 "trainer " + std::to_string(header.rank) + " has said goodbye");
  }
  return std::nullopt;
}

std::optional<Error> Peers::incarnation_refusal(const wire::FrameHeader& header,
                                                const wire::Hello& hello) const {
  const Peer* const peer = header.rank < peers_.size() ? &peers_[header.rank] : nullptr;
  const std::string who = "trainer " + std::to_string(header.rank) + ": incarnation " +
                          std::to_string(header.incarnation);
  uint64_t most = 1;  // where all are started together each is started once
  if (options_.elastic) {
    const auto lives =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started_);
    most = kStartsAtFirst + kStartsPerSecond * static_cast<uint64_t>(lives.count()) / 1000;
  }
  if (header.incarnation > most) {
    return Error(ErrorCode::kConfigMismatch,
                 who + ", expected at most " + std::to_string(most) +
                     " since this server was started, as they count the starts of a trainer; the "
                     "last one met is " +
                     std::to_string(peer == nullptr ? 0 : peer->incarnation) +
                     ". Is it a trainer of another run?");
  }
  // A number that another process has is gone, whatever became of that one.
  const bool taken = options_.elastic && peer != nullptr && peer->seen &&
                     header.incarnation == peer->incarnation && hello.host != peer->host;
  if (!taken) return std::nullopt;
  return Error(ErrorCode::kFenced, who + " is another process, " + describe(header.rank));
}

std::optional<Error> Peers::crowd_refusal(uint32_t rank) const {
  if (rank < options_.trainer_count) return std::nullopt;
  const auto present = [](const Peer& peer) {
    return peer.connection || (peer.seen && !peer.gone && peer.lost.empty());
  };
  if (rank < peers_.size() && present(peers_[rank])) return std::nullopt;
  const auto more = peers_.begin() + options_.trainer_count;
  if (static_cast<uint64_t>(std::count_if(more, peers_.end(), present)) < more_trainers_) {
    return std::nullopt;
  }
  return Error(ErrorCode::kOverloaded,
               "trainer " + std::to_string(rank) + ": " + std::to_string(more_trainers_) +
                   " trainers beyond those that were expected, " +
                   std::to_string(options_.trainer_count) +
                   ", are there, as many as a quarter of the file descriptors is enough for. "
                   "Raise their limit (ulimit -n) for the servers");
}

Error Peers::told_itself(const std::string& lost) const {
  if (!options_.elastic) return Error(ErrorCode::kPeerLost, lost + "; it cannot come back");
  return Error(ErrorCode::kCountedLost, lost + "; only a restart of it can come back");
}

Buffer Peers::make_hello(uint32_t rank, uint64_t last_sequence) const {
  wire::Hello reply;
  reply.trainer_count = options_.trainer_count;
  reply.server_count = options_.server_count;
  reply.shard_id = options_.shard_id;
  reply.last_sequence = last_sequence;
  reply.carried_out_before = sequencer_.carried_out_before(rank);
  reply.host = options_.host;
  return encode(reply);
}

std::optional<Peers::Takeover> Peers::greet(
    const std::shared_ptr<transport::Connection>& connection, const wire::FrameHeader& header,
    const wire::Hello& hello, Outbox& outbox) {
  const std::lock_guard lock(mutex_);
  Session& session =
      sessions_.try_emplace(connection.get(), Session{connection, std::nullopt, 0, false})
          .first->second;
  // Links that lose frames duplicate them, and their clients repeat a hello that got no answer.
  const bool repeated = session.rank == header.rank && !session.fenced &&
                        session.incarnation == header.incarnation && !connection->reliable();
  if (repeated) {
    outbox.answer(connection, header, wire::FrameKind::kHello,
                  make_hello(header.rank, sequencer_.last_sequence(header.rank)));
    return std::nullopt;
  }
  if (session.rank || session.fenced) {
    throw Error(ErrorCode::kProtocol, "a second hello on one connection");
  }
  if (const auto error = refusal(header, hello)) {
    counters_.refused.fetch_add(1);
    wire::FrameHeader about = header;
    // Which one has taken over: a process that starts takes the next number.
    if (error->code() == ErrorCode::kFenced) about.sequence = peers_[header.rank].incarnation;
    outbox.answer(connection, about, *error);
    outbox.close(connection, error->what());
    return std::nullopt;
  }
  // What may throw comes before what changes.
  std::string address = connection->peer_address();
  std::string host = hello.host;
  Descriptor process = connection->peer_process();
  sequencer_.make_room(header.rank);
  if (header.rank >= peers_.size()) peers_.resize(size_t{header.rank} + 1);
  Peer& peer = peers_[header.rank];
  const bool restarted = (peer.seen || !peer.lost.empty()) && header.incarnation > peer.incarnation;
  Outbox later(options_.run_id, options_.shard_id);
  if (peer.connection && peer.connection != connection) replace_connection(peer, header, later);
  const auto reply = std::make_shared<Buffer>(
      make_hello(header.rank, restarted ? 0 : sequencer_.last_sequence(header.rank)));
  later.add(connection, later.reply_header(header, wire::FrameKind::kHello), reply);
  outbox.append(std::move(later));
  if (peer.connection && peer.connection != connection) {
    sessions_.at(peer.connection.get()).fenced = true;
  }
  peer.connection = connection;
  sequencer_.bind(header.rank, header.incarnation, connection, restarted);
  if (restarted) {
    peer.goodbye = peer.gone = false;
    peer.lost.clear();
  }
  met_ += peer.seen ? 0 : 1;
  peer.seen = true;
  peer.ended.clear();
  peer.incarnation = header.incarnation;
  peer.host = std::move(host);
  peer.address = std::move(address);
  peer.process = std::move(process);
  peer.heard = Clock::now();
  session.rank = header.rank;
  session.incarnation = header.incarnation;
  changed_.notify_all();
  return restarted ? std::optional(Takeover{header.rank, reply}) : std::nullopt;
}

void Peers::welcome(const Takeover& takeover) const noexcept {
  wire::put_carried_out_before(takeover.hello.get(), sequencer_.carried_out_before(takeover.rank));
}

void Peers::replace_connection(const Peer& peer, const wire::FrameHeader& header,
                               Outbox& outbox) const {
  const auto& old = peer.connection;
  if (header.incarnation == peer.incarnation) {
    outbox.close(old, "replaced by a newer connection of the same trainer");
    return;
  }
  wire::FrameHeader about = header;
  about.request_id = 0;
  about.incarnation = peer.incarnation;
  outbox.answer(old, about,
                Error(ErrorCode::kFenced,
                      "trainer " + std::to_string(header.rank) + ": incarnation " +
                          std::to_string(header.incarnation) + " has taken over from this one, " +
                          std::to_string(peer.incarnation)));
  outbox.close(old, "fenced by a newer incarnation");
}

uint32_t Peers::identify(const std::shared_ptr<transport::Connection>& connection,
                         const wire::FrameHeader& header) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(connection.get());
  if (found == sessions_.end() || (!found->second.rank && !found->second.fenced)) {
    throw Error(ErrorCode::kProtocol, "a frame before the hello");
  }
  const Session& session = found->second;
  if (session.fenced) {
    throw Error(ErrorCode::kProtocol, "a frame on a connection that has been replaced");
  }
  if (header.run_id != options_.run_id || header.incarnation != session.incarnation ||
      header.rank != *session.rank || header.role != wire::Role::kTrainer) {
    throw Error(ErrorCode::kProtocol, "a frame of run " + std::to_string(header.run_id) +
                                          ", trainer " + std::to_string(header.rank) +
                                          ", incarnation " + std::to_string(header.incarnation) +
                                          " on the connection of trainer " +
                                          std::to_string(*session.rank) + ", incarnation " +
                                          std::to_string(session.incarnation));
  }
  peers_[*session.rank].heard = Clock::now();
  return *session.rank;
}

void Peers::say_goodbye(uint32_t rank) {
  const std::lock_guard lock(mutex_);
  peers_[rank].goodbye = true;
  changed_.notify_all();
}

void Peers::confirm_goodbye(uint32_t rank) {
  const std::lock_guard lock(mutex_);
  if (!peers_[rank].goodbye) return;
  peers_[rank].gone = true;
  peers_[rank].process = Descriptor();
  changed_.notify_all();
}

std::vector<uint32_t> Peers::active() const {
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = peers_[rank];
    const bool away = options_.elastic && (!peer.lost.empty() || !expected(rank));
    if (!peer.goodbye && !away) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<uint32_t> Peers::remaining() const {
  const TimePoint now = Clock::now();
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = peers_[rank];
    const bool given_up = options_.elastic && !peer.lost.empty() && now >= given_up_at(peer);
    const bool stranger = options_.elastic && !expected(rank);
    if (!peer.goodbye && !given_up && !stranger) ranks.push_back(rank);
  }
  return ranks;
}

void Peers::list_awaited(std::vector<uint32_t>* present, std::vector<uint32_t>* lost) const {
  const TimePoint now = Clock::now();
  const std::lock_guard lock(mutex_);
  for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = peers_[rank];
    if (!peer.seen || peer.goodbye) continue;
    if (peer.lost.empty()) {
      present->push_back(rank);
    } else if (!options_.elastic || now < given_up_at(peer)) {
      lost->push_back(rank);
    }
  }
}

bool Peers::is_lost(uint32_t rank) const {
  const std::lock_guard lock(mutex_);
  return !peers_[rank].lost.empty();
}

std::optional<Error> Peers::find_lost(const std::vector<uint32_t>& ranks) const {
  const std::lock_guard lock(mutex_);
  for (const uint32_t rank : ranks) {
    const std::string& lost = peers_[rank].lost;
    if (!lost.empty()) return Error(ErrorCode::kPeerLost, lost);
  }
  return std::nullopt;
}

std::optional<Error> Peers::find_lost() const {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    if (!peer.lost.empty()) return Error(ErrorCode::kPeerLost, peer.lost);
  }
  return std::nullopt;
}

// Ids are issued one by one, but trainers connect in any order.
bool Peers::expected(uint32_t rank) const {
  return rank < options_.trainer_count || peers_[rank].seen;
}

std::string Peers::describe(uint32_t rank) const {
  const Peer& peer = peers_[rank];
  std::string text = "trainer " + std::to_string(rank);
  if (peer.seen) text += " (" + peer.host + ", " + peer.address + ")";
  return text;
}

void Peers::note_end(uint32_t rank, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  peers_[rank].ended = reason;
}

void Peers::stop(const std::string& reason, Outbox& outbox) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(stopped_, true)) return;
  stop_reason_ = reason;
  for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = peers_[rank];
    if (!peer.connection || peer.goodbye) continue;
    wire::FrameHeader about;  // request 0: about the connection as a whole
    about.incarnation = peer.incarnation;
    outbox.answer(peer.connection, about, stopped_error());
  }
  changed_.notify_all();
}

bool Peers::stopped() const {
  const std::lock_guard lock(mutex_);
  return stopped_;
}

void Peers::add_traffic(ServerStats* stats) const {
  const std::lock_guard lock(mutex_);
  stats->connections = sessions_.size();
  for (const Peer& peer : peers_) {
    stats->trainers += peer.seen ? 1 : 0;
    stats->lost += peer.lost.empty() ? 0 : 1;
    stats->present += peer.seen && !peer.goodbye && peer.lost.empty() ? 1 : 0;
  }
  stats->bytes_sent = closed_bytes_sent_;
  stats->bytes_received = closed_bytes_received_;
  for (const auto& [key, session] : sessions_) {
    stats->bytes_sent += session.connection->bytes_sent();
    stats->bytes_received += session.connection->bytes_received();
  }
}

// ---- liveness ----

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
    // All it has sent was read: its connection ended behind that.
    const bool ended = has_ended(peer.process);
    *why =
        ended ? "its process has ended"
              : "connection closed and not replaced within " + seconds(options_.reconnect_grace_ms);
    if (!peer.ended.empty()) *why += ": " + peer.ended;
    return ended ? peer.broken : peer.broken + milliseconds(options_.reconnect_grace_ms);
  }
  *why = "silent for " + seconds(options_.liveness_ms);
  return peer.heard + milliseconds(options_.liveness_ms);
}

void Peers::note_signs_of_life(TimePoint now, bool was_away, Clock::duration missed) {
  for (Peer& peer : peers_) {
    if (!peer.connection) {
      peer.broken = std::min(peer.broken + missed, now);
      continue;
    }
    const bool moved = transport::has_moved(*peer.connection, peer.bytes_seen);
    if (was_away || moved) peer.heard = std::max(peer.heard, now);
  }
}

void Peers::wake_by(TimePoint when) {
  const std::lock_guard lock(mutex_);
  if (wake_at_ && *wake_at_ <= when) return;
  wake_at_ = when;
  changed_.notify_all();
}

void Peers::wait_for_look() {
  std::unique_lock lock(mutex_);
  const TimePoint look = Clock::now() + transport::look_interval(options_.liveness_ms);
  changed_.wait_until(lock, look, [this] { return stopped_; });
}

std::optional<Peers::Loss> Peers::wait_for_loss() {
  std::unique_lock lock(mutex_);
  transport::Attendance attendance(options_.liveness_ms);
  while (!stopped_) {
    const TimePoint now = Clock::now();
    note_signs_of_life(now, attendance.was_away(now), attendance.missed());
    std::optional<TimePoint> next;
    for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
      Peer& peer = peers_[rank];
      std::string why;
      if (!expected(rank)) continue;
      const auto at = overdue_at(peer, &why);
      if (!at) continue;
      if (*at <= Clock::now()) {
        // What may throw comes before what changes.
        std::string lost = describe(rank) + " was lost: " + why;
        std::optional<Loss> loss =
            Loss{rank, Error(ErrorCode::kPeerLost, lost), told_itself(lost), peer.connection};
        // What it left half done is not to happen once the others go on without it. Where they do
        // not, it is answered with them.
        sequencer_.refuse(rank, payload_of(loss->to_itself), options_.elastic);
        peer.lost = std::move(lost);
        peer.lost_at = Clock::now();
        peer.process = Descriptor();
        changed_.notify_all();
        return loss;
      }
      const bool may_end = peer.seen && !peer.connection && peer.process.get() >= 0;
      const TimePoint wake = may_end ? std::min(*at, now + transport::kEndLook) : *at;
      if (!next || wake < *next) next = wake;
    }
    if (wake_at_ && *wake_at_ <= now) {
      wake_at_.reset();
      return std::nullopt;
    }
    if (wake_at_ && (!next || *wake_at_ < *next)) next = wake_at_;
    const TimePoint look = now + transport::look_interval(options_.liveness_ms);
    changed_.wait_until(lock, next ? std::min(*next, look) : look);
  }
  return std::nullopt;
}

}  // namespace cpudist::server
