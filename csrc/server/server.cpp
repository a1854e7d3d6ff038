// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one class and its face
//
// Which request goes where, what concerns all parameter sets (barrier, goodbye, loss, stop), and
// the liveness thread. Replies collect in an outbox that is sent last. Lock order: registry,
// parameter set, peers, sequencer; no frame is sent with one of them held.

#include "server/server.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/background.h"
#include "base/threads.h"
#include "server/modes.h"
#include "server/param_set.h"
#include "server/shared.h"
#include "wire/frame_kind.h"
#include "wire/malformed.h"

namespace cpudist::server {
namespace {

ServerOptions checked(ServerOptions options) {
  const auto refuse = [](const char* text) { throw Error(ErrorCode::kInvalidArgument, text); };
  if (options.trainer_count == 0) refuse("a server needs at least one trainer");
  if (options.trainer_count > 0xffffu) refuse("more than 65535 trainers");
  if (options.shard_id >= options.server_count) refuse("shard_id must be below server_count");
  if (options.server_count > 0xffffu) refuse("more than 65535 servers");
  if (options.threads == 0) refuse("a server needs at least one thread");
  if (options.liveness_ms == 0) refuse("liveness_ms must be positive");
  return options;
}

// What went wrong here is not the sender's fault. kOverloaded says that the request may be sent
// again, so it is not for those that may be half done.
Error own_failure(const ServerOptions& options, const wire::FrameHeader& request,
                  const std::exception& cause) {
  const wire::FrameTraits& kind = wire::traits_of(request.kind);
  const bool memory = dynamic_cast<const std::bad_alloc*>(&cause) != nullptr;
  const ErrorCode of_memory = kind.sequenced ? ErrorCode::kOutOfMemory : ErrorCode::kOverloaded;
  return Error(memory ? of_memory : ErrorCode::kInternal,
               "server " + std::to_string(options.shard_id) + " (" + options.host +
                   ") could not handle a frame of kind " + kind.name + " of trainer " +
                   std::to_string(request.rank) + ": " +
                   (memory ? "it has no memory left" : cause.what()));
}

}  // namespace

struct Server::Impl {
  explicit Impl(ServerOptions options);
  ~Impl();

  void on_frame(const std::shared_ptr<transport::Connection>& connection, wire::Frame frame);
  void stop(const std::string& reason);
  ServerStats stats() const;
  std::vector<TableStats> table_stats() const;

  ServerShared shared;

 private:
  using Link = std::shared_ptr<transport::Connection>;

  void dispatch(const Link& connection, wire::Frame& frame, Outbox& outbox);
  void greet(const Link& connection, const wire::Frame& frame, Outbox& outbox);
  void probe(const Link& connection, const wire::FrameHeader& header, Outbox& outbox);
  void read(const Link& connection, const wire::Frame& frame, Outbox& outbox);
  Buffer read_set(const wire::Frame& frame) const;
  // If a question is to have that done.
  void take_marker_back(const wire::Frame& frame, Outbox& outbox) const;
  Buffer cut_status(const wire::Frame& frame) const;
  void sequenced(const Link& connection, wire::Frame& frame, Outbox& outbox);
  // Whether it waits for a disk or takes long, which the thread that takes frames in must not.
  bool waits(const wire::Frame& frame) const;
  // Has another thread carry it out. False where there is none.
  bool put_off(const Link& connection, const Ticket& ticket, wire::Frame& frame) noexcept;
  void carry_out_later(const Link& connection, const Ticket& ticket, wire::Frame& frame,
                       TimePoint latest) noexcept;
  void carry_out(const Ticket& ticket, wire::Frame& frame, Outbox& outbox);
  void apply(const Ticket& ticket, wire::Frame& frame, Outbox& outbox);
  void finish(const Ticket& ticket, SharedPayload error, Outbox& outbox);
  // What a sender is told. Where there is no memory for it, that.
  SharedPayload told(const Error& error) const noexcept;
  SharedPayload told(const wire::FrameHeader& request, const std::exception& cause) const noexcept;
  SharedPayload no_memory(ErrorCode code) const {
    return payload_of(Error(code, "server " + std::to_string(shared.options.shard_id) + " (" +
                                      shared.options.host + ") has no memory left"));
  }

  void open(const Ticket& ticket, wire::Frame& frame, Outbox& outbox);
  void close(const Ticket& ticket, uint32_t param_set, Outbox& outbox);
  void barrier(const Ticket& ticket, Outbox& outbox);
  void goodbye(const Ticket& ticket, Outbox& outbox);
  // With the registry held: ends the barrier once everybody who is still there has arrived.
  void try_end_barrier(Outbox& outbox);
  void drop_unused();
  bool goes_on_without_lost() const;  // with the registry held

  void watch();  // the liveness thread
  void tell(const Peers::Loss& loss);
  void give_up_cuts();
  void lose(uint32_t rank, const Error& error, Outbox& outbox);
  void fail_waiting(const Error& error, Outbox& outbox);
  std::shared_ptr<ParamSet> find(uint32_t param_set) const;  // throws kInvalidArgument
  std::vector<uint32_t> waiting_for(const ProbeResult& request, uint32_t rank) const;
  uint64_t stored_bytes(const ProbeResult& request) const;

  mutable std::shared_mutex registry_mutex_;  // sets_ and barrier_
  std::map<uint32_t, std::shared_ptr<ParamSet>> sets_;
  std::map<uint32_t, Ticket> barrier_;  // who has arrived
  const SharedPayload refused_ = no_memory(ErrorCode::kOverloaded);
  const SharedPayload failed_ = no_memory(ErrorCode::kOutOfMemory);
  std::thread watcher_;
  Background later_{"the thread of a server for requests that wait for a disk"};
};

Server::Impl::Impl(ServerOptions options) : shared(checked(std::move(options))) {
  watcher_ = start_thread("the liveness thread of a server", [this] { watch(); });
}

Server::Impl::~Impl() {
  stop({});
  join_thread(watcher_);
}

void Server::Impl::watch() {
  std::optional<Peers::Loss> loss;
  while (!shared.peers.stopped()) {
    try {
      if (!loss) loss = shared.peers.wait_for_loss();
      loss ? tell(*loss) : give_up_cuts();
      loss.reset();
    } catch (const std::exception&) {
      // There is no memory. Whoever has been told is not told again, so that the next look goes on.
      shared.peers.wait_for_look();
      shared.peers.wake_by(Clock::now());  // for cuts that were to be given up
    }
  }
}

void Server::Impl::give_up_cuts() {
  Outbox outbox(shared.options.run_id, shared.options.shard_id);
  {
    const std::shared_lock lock(registry_mutex_);
    for (const auto& [id, set] : sets_) set->give_up_cut(Clock::now(), outbox);
  }
  outbox.flush();
}

void Server::Impl::tell(const Peers::Loss& loss) {
  Outbox outbox(shared.options.run_id, shared.options.shard_id);
  try {
    lose(loss.rank, loss.error, outbox);
    if (loss.connection) outbox.close(loss.connection, loss.to_itself.what());
  } catch (...) {
    outbox.flush();  // these are recorded as answered
    throw;
  }
  outbox.flush();
}

void Server::Impl::fail_waiting(const Error& error, Outbox& outbox) {
  const std::unique_lock lock(registry_mutex_);
  for (const auto& [id, set] : sets_) set->fail_waiting(error, outbox);
  for (const auto& [rank, ticket] : barrier_) shared.sequencer.finish(ticket, error, outbox);
  barrier_.clear();
}

void Server::Impl::lose(uint32_t rank, const Error& error, Outbox& outbox) {
  const std::unique_lock lock(registry_mutex_);
  // It may be back as a newer incarnation already, which has dropped what the older one left.
  const bool back = !shared.peers.is_lost(rank);
  for (const auto& [id, set] : sets_) {
    if (back && !set->needs_everyone()) continue;
    set->lose(rank, error, outbox);
  }
  if (goes_on_without_lost()) {
    if (!back) barrier_.erase(rank);
    try_end_barrier(outbox);
    return;
  }
  for (const auto& [waiting, ticket] : barrier_) shared.sequencer.finish(ticket, error, outbox);
  barrier_.clear();
}

bool Server::Impl::goes_on_without_lost() const {
  return shared.options.elastic && std::none_of(sets_.begin(), sets_.end(), [](const auto& entry) {
           return entry.second->needs_everyone();
         });
}

void Server::Impl::stop(const std::string& reason) {
  Outbox outbox(shared.options.run_id, shared.options.shard_id);
  shared.peers.stop(reason, outbox);
  fail_waiting(shared.peers.stopped_error(), outbox);
  outbox.flush();
}

void Server::Impl::barrier(const Ticket& ticket, Outbox& outbox) {
  const std::unique_lock lock(registry_mutex_);
  for (const auto& [id, set] : sets_) set->remove_member(ticket.rank, outbox);
  // Marked lost before the registry is locked to answer those who wait: one of the two is seen.
  const auto lost = shared.peers.find_lost();
  if (lost && !goes_on_without_lost()) throw *lost;
  if (!shared.sequencer.is_current(ticket)) return;
  barrier_[ticket.rank] = ticket;
  try_end_barrier(outbox);
}

void Server::Impl::try_end_barrier(Outbox& outbox) {
  if (barrier_.empty()) return;
  const std::vector<uint32_t> active = shared.peers.active();
  for (const uint32_t rank : active) {
    if (!barrier_.contains(rank)) return;
  }
  for (const auto& [id, set] : sets_) set->reset_members(active);
  for (const auto& [rank, ticket] : barrier_) {
    wire::BarrierReply reply;
    for (const auto& [id, set] : sets_) reply.rounds.emplace_back(id, set->round_of(rank));
    shared.sequencer.finish(ticket, encode(reply), outbox);
  }
  barrier_.clear();
}

void Server::Impl::goodbye(const Ticket& ticket, Outbox& outbox) {
  const std::unique_lock lock(registry_mutex_);
  shared.peers.say_goodbye(ticket.rank);
  for (const auto& [id, set] : sets_) set->mark_closed(ticket.rank, outbox);
  drop_unused();
  try_end_barrier(outbox);
  shared.sequencer.finish(ticket, encode(wire::RoundReply{0}), outbox);
}

void Server::Impl::drop_unused() {
  const std::vector<uint32_t> remaining = shared.peers.remaining();
  std::erase_if(sets_, [&](const auto& entry) { return entry.second->unused(remaining); });
}

ServerStats Server::Impl::stats() const {
  ServerStats stats;
  stats.rounds = shared.counters.rounds.load();
  stats.pushes = shared.counters.pushes.load();
  stats.nonfinite = shared.counters.nonfinite.load();
  stats.duplicates = shared.counters.duplicates.load();
  stats.pending_bytes = shared.counters.pending_bytes.load();
  stats.refused = shared.counters.refused.load();
  stats.snapshot_bytes = shared.snapshots.image_bytes();
  stats.snapshot_waits = shared.snapshots.waits();
  stats.memory_bytes = shared.memory.size_bytes();
  shared.peers.add_traffic(&stats);
  const std::shared_lock lock(registry_mutex_);
  for (const auto& [id, set] : sets_) set->add_stats(&stats);
  return stats;
}

std::vector<TableStats> Server::Impl::table_stats() const {
  std::vector<TableStats> tables;
  const std::shared_lock lock(registry_mutex_);
  for (const auto& [id, set] : sets_) set->add_table_stats(&tables);
  return tables;
}

// ---- from a frame to the request it carries ----

void Server::Impl::on_frame(const std::shared_ptr<transport::Connection>& connection,
                            wire::Frame frame) {
  Outbox outbox(shared.options.run_id, shared.options.shard_id);
  try {
    dispatch(connection, frame, outbox);
  } catch (const Error& error) {
    shared.counters.refused.fetch_add(1);
    outbox.flush();
    throw Error(ErrorCode::kProtocol, error.what());
  } catch (const std::exception& cause) {
    const Error error = own_failure(shared.options, frame.header, cause);
    outbox.answer(connection, frame.header, error);
    outbox.flush();
    throw error;
  }
  outbox.flush();
  if (frame.header.kind == wire::FrameKind::kGoodbye)
    shared.peers.confirm_goodbye(frame.header.rank);
}

// Throws only for what must close the connection.
void Server::Impl::dispatch(const Link& connection, wire::Frame& frame, Outbox& outbox) {
  if (frame.header.kind == wire::FrameKind::kHello) {
    greet(connection, frame, outbox);
    return;
  }
  const uint32_t rank = shared.peers.identify(connection, frame.header);
  const wire::FrameTraits& kind = wire::traits_of(frame.header.kind);
  if (frame.header.coded && !kind.coded) {
    throw Error(ErrorCode::kProtocol, std::string("a coded frame of kind ") + kind.name);
  }
  if (kind.sequenced) {
    sequenced(connection, frame, outbox);
    return;
  }
  switch (frame.header.kind) {
    case wire::FrameKind::kError:
      shared.peers.note_end(rank, wire::decode_frame([&] {
                                    return wire::decode_error(frame.payload.bytes());
                                  }).message);
      return;
    case wire::FrameKind::kHeartbeat:
      outbox.answer(connection, frame.header, wire::FrameKind::kHeartbeatAck, Buffer());
      return;
    case wire::FrameKind::kHeartbeatAck:
      return;
    case wire::FrameKind::kProbe:
      probe(connection, frame.header, outbox);
      return;
    case wire::FrameKind::kPullRows:
    case wire::FrameKind::kPullDense:
    case wire::FrameKind::kFetchState:
    case wire::FrameKind::kFetchRun:
    case wire::FrameKind::kCutStatus:
    case wire::FrameKind::kTableStats:
    case wire::FrameKind::kPart:
      read(connection, frame, outbox);
      return;
    default:
      throw Error(ErrorCode::kProtocol,
                  std::string("a server takes no frame of kind ") + kind.name);
  }
}

void Server::Impl::greet(const Link& connection, const wire::Frame& frame, Outbox& outbox) {
  const wire::Hello hello =
      wire::decode_frame([&] { return wire::decode_hello(frame.payload.bytes()); });
  const auto takeover = shared.peers.greet(connection, frame.header, hello, outbox);
  if (!takeover) return;
  {
    const std::unique_lock lock(registry_mutex_);
    for (const auto& [id, set] : sets_) set->drop(takeover->rank, outbox);
    barrier_.erase(takeover->rank);
  }
  shared.peers.welcome(*takeover);
}

void Server::Impl::probe(const Link& connection, const wire::FrameHeader& header, Outbox& outbox) {
  const ProbeResult result = shared.sequencer.probe(connection, header, outbox);
  wire::ProbeReply reply;
  switch (result.state) {
    case ProbeResult::State::kAnswered:
    case ProbeResult::State::kOld:
      return;
    case ProbeResult::State::kWaiting:
      reply.known = true;
      reply.waiting_for = waiting_for(result, header.rank);
      if (result.kind == wire::FrameKind::kReady) reply.stored_bytes = stored_bytes(result);
      break;
    case ProbeResult::State::kUnknown:
      break;
  }
  outbox.answer(connection, header, wire::FrameKind::kProbeReply, encode(reply));
}

uint64_t Server::Impl::stored_bytes(const ProbeResult& request) const {
  const std::shared_lock lock(registry_mutex_);
  const auto set = sets_.find(request.param_set);
  return set == sets_.end() ? 0 : set->second->stored_bytes();
}

std::vector<uint32_t> Server::Impl::waiting_for(const ProbeResult& request, uint32_t rank) const {
  const std::shared_lock lock(registry_mutex_);
  if (request.kind == wire::FrameKind::kBarrier) {
    std::vector<uint32_t> ranks;
    for (const uint32_t active : shared.peers.active()) {
      if (!barrier_.contains(active)) ranks.push_back(active);
    }
    return ranks;
  }
  const auto set = sets_.find(request.param_set);
  return set == sets_.end() ? std::vector<uint32_t>{}
                            : set->second->waiting_for(request.kind, rank);
}

void Server::Impl::read(const Link& connection, const wire::Frame& frame, Outbox& outbox) {
  try {
    if (frame.header.kind == wire::FrameKind::kCutStatus) take_marker_back(frame, outbox);
    outbox.answer(connection, frame.header, wire::FrameKind::kReply, read_set(frame),
                  frame.header.coded);
  } catch (const wire::MalformedFrame&) {
    throw;
  } catch (const Error& error) {
    outbox.answer(connection, frame.header, error);
  } catch (const std::exception& error) {
    outbox.answer(connection, frame.header, Error(ErrorCode::kInternal, error.what()));
  }
}

Buffer Server::Impl::read_set(const wire::Frame& frame) const {
  if (shared.peers.stopped()) throw shared.peers.stopped_error();
  if (frame.header.kind == wire::FrameKind::kCutStatus) return cut_status(frame);
  const auto set = find(frame.header.param_set);
  if (frame.header.kind == wire::FrameKind::kPullRows)
    return set->pull_rows(frame.header, frame.payload);
  if (frame.header.kind == wire::FrameKind::kFetchState) return set->fetch(frame.payload);
  if (frame.header.kind == wire::FrameKind::kTableStats) return set->table_counts(frame.payload);
  if (frame.header.kind == wire::FrameKind::kFetchRun) return set->fetch_run(frame.payload);
  if (frame.header.kind == wire::FrameKind::kPart) {
    set->take_part(frame.header.rank, frame.payload.share());
    return {};
  }
  return set->pull_dense(frame.header, frame.payload);
}

void Server::Impl::take_marker_back(const wire::Frame& frame, Outbox& outbox) const {
  const auto query =
      wire::decode_frame([&] { return wire::decode_cut_query(frame.payload.bytes()); });
  if (!query.take_back || shared.peers.stopped()) return;
  find(frame.header.param_set)->take_marker_back(frame.header.rank, query.number, outbox);
}

Buffer Server::Impl::cut_status(const wire::Frame& frame) const {
  const auto query =
      wire::decode_frame([&] { return wire::decode_cut_query(frame.payload.bytes()); });
  if (query.number == 0 && query.token.empty()) {
    wire::CutStatus status;
    status.shard = shared.options.shard_id;
    status.members = find(frame.header.param_set)->taking_part();
    shared.peers.list_awaited(&status.present, &status.lost);
    return encode(status);
  }
  if (query.number == 0 && !wire::is_snapshot_name(query.token)) {
    throw Error(ErrorCode::kInvalidArgument,
                "'" + query.token.substr(0, 200) + "' cannot be the name of a file of snapshots");
  }
  return encode(shared.snapshots.status(frame.header.param_set, query.number, query.token));
}

void Server::Impl::sequenced(const Link& connection, wire::Frame& frame, Outbox& outbox) {
  if (frame.header.sequence == 0) {
    throw Error(ErrorCode::kProtocol, "a request that changes state without a sequence number");
  }
  Ticket ticket;
  if (shared.sequencer.admit(connection, frame.header, &ticket, outbox) != Admission::kNew) return;
  if (waits(frame) && put_off(connection, ticket, frame)) return;
  carry_out(ticket, frame, outbox);
}

bool Server::Impl::waits(const wire::Frame& frame) const {
  if (frame.header.kind == wire::FrameKind::kLoad) return true;
  if (frame.header.kind == wire::FrameKind::kShrink) return true;
  return frame.header.kind == wire::FrameKind::kPush && !shared.snapshots.has_room();
}

bool Server::Impl::put_off(const Link& connection, const Ticket& ticket,
                           wire::Frame& frame) noexcept {
  const TimePoint latest = Clock::now() + SnapshotWriter::kLongestWait;
  std::shared_ptr<wire::Frame> kept;
  try {
    kept = std::make_shared<wire::Frame>(std::move(frame));
    later_.put([=, this] { carry_out_later(connection, ticket, *kept, latest); });
    return true;
  } catch (const std::exception&) {
    if (kept) frame = std::move(*kept);  // it is carried out here
    return false;
  }
}

void Server::Impl::carry_out_later(const Link& connection, const Ticket& ticket, wire::Frame& frame,
                                   TimePoint latest) noexcept {
  Outbox outbox(shared.options.run_id, shared.options.shard_id);
  try {
    if (frame.header.kind == wire::FrameKind::kPush) shared.snapshots.wait_for_room(latest);
    try {
      carry_out(ticket, frame, outbox);
    } catch (const Error& error) {
      shared.counters.refused.fetch_add(1);
      outbox.close(connection, error.what());
    }
    outbox.flush();
  } catch (const std::exception&) {
    // There is no memory to answer, or no link. The request is finished, and the trainer, which
    // asks again, is told.
  }
}

void Server::Impl::carry_out(const Ticket& ticket, wire::Frame& frame, Outbox& outbox) {
  try {
    if (shared.peers.stopped()) throw shared.peers.stopped_error();
    if (frame.dropped) {
      find(frame.header.param_set)->refuse_push(ticket, frame.header.length, outbox);
    }
    apply(ticket, frame, outbox);
  } catch (const wire::MalformedFrame&) {
    shared.sequencer.forget(ticket);
    throw;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kOverloaded) {
      shared.sequencer.reject(ticket, told(error), outbox);
    } else {
      finish(ticket, told(error), outbox);
    }
  } catch (const std::exception& cause) {
    finish(ticket, told(frame.header, cause), outbox);
  }
}

void Server::Impl::finish(const Ticket& ticket, SharedPayload error, Outbox& outbox) {
  shared.sequencer.finish(ticket, wire::FrameKind::kError, Answer(std::move(error)), outbox);
}

SharedPayload Server::Impl::told(const Error& error) const noexcept {
  try {
    return payload_of(error);
  } catch (const std::bad_alloc&) {
    return error.code() == ErrorCode::kOverloaded ? refused_ : failed_;
  }
}

SharedPayload Server::Impl::told(const wire::FrameHeader& request,
                                 const std::exception& cause) const noexcept {
  try {
    return payload_of(own_failure(shared.options, request, cause));
  } catch (const std::bad_alloc&) {
    return failed_;
  }
}

void Server::Impl::apply(const Ticket& ticket, wire::Frame& frame, Outbox& outbox) {
  const uint32_t id = frame.header.param_set;
  switch (frame.header.kind) {
    case wire::FrameKind::kOpen:
      return open(ticket, frame, outbox);
    case wire::FrameKind::kClose:
      return close(ticket, id, outbox);
    case wire::FrameKind::kBarrier:
      return barrier(ticket, outbox);
    case wire::FrameKind::kGoodbye:
      return goodbye(ticket, outbox);
    case wire::FrameKind::kStore:
      return find(id)->store(ticket, frame.payload, outbox);
    case wire::FrameKind::kStoreRun:
      return find(id)->store_run(ticket, frame.payload, outbox);
    case wire::FrameKind::kLoad:
      return find(id)->load(ticket, frame.payload, outbox);
    case wire::FrameKind::kShrink:
      return find(id)->shrink(ticket, frame.payload, outbox);
    case wire::FrameKind::kReady:
      return find(id)->ready(ticket, outbox);
    case wire::FrameKind::kPush:
      return find(id)->push(ticket, std::move(frame.payload), frame.header.coded, outbox);
    case wire::FrameKind::kCommit:
      return find(id)->commit(ticket, frame.payload, outbox);
    case wire::FrameKind::kCut:
      return find(id)->cut(ticket, frame.payload, outbox);
    case wire::FrameKind::kLeave:
      return find(id)->leave(ticket, outbox);
    case wire::FrameKind::kJoin: {
      const auto join =
          wire::decode_frame([&] { return wire::decode_join(frame.payload.bytes()); });
      return find(id)->join(ticket, join, outbox);
    }
    default:
      throw Error(ErrorCode::kInternal, "not a sequenced request");
  }
}

void Server::Impl::open(const Ticket& ticket, wire::Frame& frame, Outbox& outbox) {
  const uint32_t id = frame.header.param_set;
  std::shared_ptr<ParamSet> set;
  {
    const std::unique_lock lock(registry_mutex_);
    auto& slot = sets_[id];
    if (slot == nullptr) {
      try {
        slot = std::make_shared<ParamSet>(id, frame.payload.share(), ticket.rank,
                                          shared.peers.remaining(), shared, all_modes());
      } catch (...) {
        sets_.erase(id);
        throw;
      }
    }
    set = slot;
  }
  set->open(ticket, frame.payload, outbox);
}

void Server::Impl::close(const Ticket& ticket, uint32_t param_set, Outbox& outbox) {
  const std::unique_lock lock(registry_mutex_);
  const auto found = sets_.find(param_set);
  if (found == sets_.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                "no parameter set " + std::to_string(param_set) + " is open on this server");
  }
  found->second->close(ticket, outbox);
  drop_unused();
}

std::shared_ptr<ParamSet> Server::Impl::find(uint32_t param_set) const {
  const std::shared_lock lock(registry_mutex_);
  const auto found = sets_.find(param_set);
  if (found != sets_.end()) return found->second;
  throw Error(ErrorCode::kInvalidArgument,
              "no parameter set " + std::to_string(param_set) + " is open on this server");
}

// ---- the face ----

Server::Server(ServerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}

Server::~Server() = default;

void Server::on_open(const std::shared_ptr<transport::Connection>& connection) {
  impl_->shared.peers.opened(connection);
}

void Server::on_frame(const std::shared_ptr<transport::Connection>& connection, wire::Frame frame) {
  impl_->on_frame(connection, std::move(frame));
}

Buffer Server::payload_memory(const wire::FrameHeader& header,
                              const std::shared_ptr<BufferPool>& pool) {
  const ServerShared& shared = impl_->shared;
  if (!shared.memory.limited() || header.kind != wire::FrameKind::kPush) {
    return transport::ConnectionHandler::payload_memory(header, pool);
  }
  return shared.memory.take(header.length);
}

void Server::on_close(const std::shared_ptr<transport::Connection>& connection,
                      const std::string& reason) {
  static_cast<void>(reason);  // the message of a loss says what follows from it
  impl_->shared.peers.closed(connection);
}

bool Server::wait_done(TimePoint deadline) { return impl_->shared.peers.wait_done(deadline); }

void Server::stop(const std::string& reason) { impl_->stop(reason); }

void Server::set_snapshot_directory(const std::string& path) {
  impl_->shared.snapshots.set_directory(path);
}

ServerStats Server::stats() const { return impl_->stats(); }

std::vector<TableStats> Server::table_stats() const { return impl_->table_stats(); }

}  // namespace cpudist::server
