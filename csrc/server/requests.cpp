// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// From a frame to the request it carries. Replies collect in an outbox that is sent last.

#include <mutex>
#include <string>
#include <utility>

#include "server/server_impl.h"

namespace cpudist::server {

void Server::Impl::on_frame(const std::shared_ptr<transport::Connection>& connection,
                            wire::Frame frame) {
  Outbox outbox(shared.options.run_id, shared.options.shard_id);
  try {
    dispatch(connection, frame, outbox);
  } catch (const std::exception& error) {
    shared.counters.refused.fetch_add(1);
    outbox.flush();
    throw Error(ErrorCode::kProtocol, error.what());
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
      shared.peers.note_end(
          rank, decode_frame([&] { return wire::decode_error(bytes_of(frame.payload)); }).message);
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
      read(connection, frame, outbox);
      return;
    default:
      throw Error(ErrorCode::kProtocol,
                  std::string("a server takes no frame of kind ") + kind.name);
  }
}

void Server::Impl::greet(const Link& connection, const wire::Frame& frame, Outbox& outbox) {
  const wire::Hello hello =
      decode_frame([&] { return wire::decode_hello(bytes_of(frame.payload)); });
  const auto restarted = shared.peers.greet(connection, frame.header, hello, outbox);
  if (!restarted) return;
  const std::unique_lock lock(registry_mutex_);
  for (const auto& [id, set] : sets_) set->drop(*restarted, outbox);
  barrier_.erase(*restarted);
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
      break;
    case ProbeResult::State::kUnknown:
      break;
  }
  outbox.answer(connection, header, wire::FrameKind::kProbeReply, encode(reply));
}

std::vector<uint32_t> Server::Impl::waiting_for(const ProbeResult& request, uint32_t rank) const {
  const std::shared_lock lock(registry_mutex_);
  if (request.kind == wire::FrameKind::kBarrier) {
    std::vector<uint32_t> ranks;
    for (const uint32_t rank : shared.peers.active()) {
      if (!barrier_.contains(rank)) ranks.push_back(rank);
    }
    return ranks;
  }
  const auto set = sets_.find(request.param_set);
  return set == sets_.end() ? std::vector<uint32_t>{}
                            : set->second->waiting_for(request.kind, rank);
}

void Server::Impl::read(const Link& connection, const wire::Frame& frame, Outbox& outbox) {
  try {
    outbox.answer(connection, frame.header, wire::FrameKind::kReply, read_set(frame),
                  frame.header.coded);
  } catch (const MalformedFrame&) {
    throw;
  } catch (const Error& error) {
    outbox.answer(connection, frame.header, error);
  } catch (const std::exception& error) {
    outbox.answer(connection, frame.header, Error(ErrorCode::kInternal, error.what()));
  }
}

Buffer Server::Impl::read_set(const wire::Frame& frame) const {
  if (shared.peers.stopped()) throw shared.peers.stopped_error();
  const auto set = find(frame.header.param_set);
  if (frame.header.kind == wire::FrameKind::kPullRows)
    return set->pull_rows(frame.header, frame.payload);
  if (frame.header.kind == wire::FrameKind::kFetchState) return set->fetch(frame.payload);
  return set->pull_dense(frame.header, frame.payload);
}

void Server::Impl::sequenced(const Link& connection, wire::Frame& frame, Outbox& outbox) {
  if (frame.header.sequence == 0) {
    throw Error(ErrorCode::kProtocol, "a request that changes state without a sequence number");
  }
  Ticket ticket;
  if (shared.sequencer.admit(connection, frame.header, &ticket, outbox) != Admission::kNew) return;
  try {
    if (shared.peers.stopped()) throw shared.peers.stopped_error();
    if (frame.dropped) find(frame.header.param_set)->refuse_push(frame.header.length);
    apply(ticket, frame, outbox);
  } catch (const MalformedFrame&) {
    shared.sequencer.forget(ticket);
    throw;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kOverloaded) {
      shared.sequencer.reject(ticket, error, outbox);
    } else {
      shared.sequencer.finish(ticket, error, outbox);
    }
  } catch (const std::exception& error) {
    shared.sequencer.finish(ticket, Error(ErrorCode::kInternal, error.what()), outbox);
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
    case wire::FrameKind::kReady:
      return find(id)->ready(ticket, outbox);
    case wire::FrameKind::kPush:
      return find(id)->push(ticket, std::move(frame.payload), frame.header.coded, outbox);
    case wire::FrameKind::kCommit: {
      const auto commit =
          decode_frame([&] { return wire::decode_commit(bytes_of(frame.payload)); });
      return find(id)->commit(ticket, commit, outbox);
    }
    case wire::FrameKind::kLeave:
      return find(id)->leave(ticket, outbox);
    case wire::FrameKind::kJoin: {
      const auto join = decode_frame([&] { return wire::decode_join(bytes_of(frame.payload)); });
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
                                          shared.peers.remaining(), shared);
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

}  // namespace cpudist::server
