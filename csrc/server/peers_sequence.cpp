// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Exactly once: a request is admitted when its number is the next one, and its reply is recorded
// in the same step that lets the next number in.

#include <string>
#include <utility>

#include "server/peers.h"

namespace cpudist::server {

Admission Peers::admit(const std::shared_ptr<transport::Connection>& connection,
                       const wire::FrameHeader& header, Ticket* ticket, Outbox& outbox) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[header.rank];
  *ticket = Ticket{header.rank, header.incarnation, header.sequence};
  // A takeover may have happened between identify and here.
  if (peer.incarnation != header.incarnation) return Admission::kHandled;
  if (options_.elastic && !peer.lost.empty()) {  // its connection is being closed
    answer(connection, header, Error(ErrorCode::kPeerLost, peer.lost), outbox);
    return Admission::kRefused;
  }
  if (header.sequence <= peer.last_sequence) {
    counters_.duplicates.fetch_add(1);
    if (header.sequence == peer.last_sequence && peer.last_payload) {
      wire::FrameHeader reply = peer.last_header;
      reply.request_id = header.request_id;
      outbox.add(connection, reply, peer.last_payload);
    }
    return Admission::kHandled;
  }
  if (header.sequence != peer.last_sequence + 1) {
    const std::string expected = std::to_string(peer.last_sequence + 1);
    answer(connection, header,
           Error(ErrorCode::kProtocol, "sequence gap: expected request " + expected +
                                           " of trainer " + std::to_string(header.rank) +
                                           ", found " + std::to_string(header.sequence)),
           outbox);
    return Admission::kRefused;
  }
  if (peer.received) {
    counters_.duplicates.fetch_add(1);
    peer.received->header.request_id = header.request_id;
    return Admission::kHandled;
  }
  peer.received = Received{header.sequence, header};
  return Admission::kNew;
}

const Peers::Received* Peers::current(const Ticket& ticket) const {
  const Peer& peer = peers_[ticket.rank];
  const bool same = peer.incarnation == ticket.incarnation && peer.received &&
                    peer.received->sequence == ticket.sequence;
  return same ? &*peer.received : nullptr;
}

bool Peers::is_current(const Ticket& ticket) const {
  const std::lock_guard lock(mutex_);
  return current(ticket) != nullptr;
}

void Peers::finish(const Ticket& ticket, wire::FrameKind kind, Answer answer, Outbox& outbox) {
  const std::lock_guard lock(mutex_);
  const Received* received = current(ticket);
  if (received == nullptr) return;
  Peer& peer = peers_[ticket.rank];
  peer.last_header = reply_header(received->header, kind);
  peer.last_header.coded = answer.coded;
  peer.last_sequence = ticket.sequence;
  peer.last_payload = std::move(answer.payload);
  peer.received.reset();
  if (peer.connection) outbox.add(peer.connection, peer.last_header, peer.last_payload);
}

void Peers::finish(const Ticket& ticket, Buffer payload, Outbox& outbox) {
  finish(ticket, wire::FrameKind::kReply,
         Answer(std::make_shared<const Buffer>(std::move(payload))), outbox);
}

void Peers::finish(const Ticket& ticket, const Error& error, Outbox& outbox) {
  auto payload =
      std::make_shared<const Buffer>(encode(wire::ErrorReply{error.code(), error.what()}));
  finish(ticket, wire::FrameKind::kError, Answer(std::move(payload)), outbox);
}

void Peers::reject(const Ticket& ticket, const Error& error, Outbox& outbox) {
  const std::lock_guard lock(mutex_);
  const Received* received = current(ticket);
  if (received == nullptr) return;
  Peer& peer = peers_[ticket.rank];
  if (peer.connection) answer(peer.connection, received->header, error, outbox);
  peer.received.reset();
}

void Peers::forget(const Ticket& ticket) {
  const std::lock_guard lock(mutex_);
  if (current(ticket) != nullptr) peers_[ticket.rank].received.reset();
}

ProbeResult Peers::probe(const std::shared_ptr<transport::Connection>& connection,
                         const wire::FrameHeader& header, Outbox& outbox) {
  const std::lock_guard lock(mutex_);
  const Peer& peer = peers_[header.rank];
  ProbeResult result;
  if (peer.incarnation != header.incarnation || header.sequence < peer.last_sequence) {
    result.state = ProbeResult::State::kOld;
  } else if (header.sequence == peer.last_sequence && peer.last_payload) {
    counters_.duplicates.fetch_add(1);
    wire::FrameHeader reply = peer.last_header;
    reply.request_id = header.request_id;
    outbox.add(connection, reply, peer.last_payload);
    result.state = ProbeResult::State::kAnswered;
  } else if (peer.received && peer.received->sequence == header.sequence) {
    result.state = ProbeResult::State::kWaiting;
    result.kind = peer.received->header.kind;
    result.param_set = peer.received->header.param_set;
  }
  return result;
}

wire::FrameHeader Peers::reply_header(const wire::FrameHeader& request,
                                      wire::FrameKind kind) const {
  wire::FrameHeader header;
  header.kind = kind;
  header.run_id = options_.run_id;
  header.epoch = request.epoch;
  header.incarnation = request.incarnation;
  header.role = wire::Role::kServer;
  header.rank = static_cast<uint16_t>(options_.shard_id);
  header.param_set = request.param_set;
  header.request_id = request.request_id;
  header.sequence = request.sequence;
  return header;
}

void Peers::answer(const std::shared_ptr<transport::Connection>& connection,
                   const wire::FrameHeader& request, wire::FrameKind kind, Buffer payload,
                   Outbox& outbox, bool coded) const {
  wire::FrameHeader header = reply_header(request, kind);
  header.coded = coded;
  outbox.add(connection, header, std::move(payload));
}

void Peers::answer(const std::shared_ptr<transport::Connection>& connection,
                   const wire::FrameHeader& request, const Error& error, Outbox& outbox) const {
  answer(connection, request, wire::FrameKind::kError,
         encode(wire::ErrorReply{error.code(), error.what()}), outbox);
}

}  // namespace cpudist::server
