// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/sequencer.h"

#include <algorithm>
#include <new>
#include <utility>

#include "wire/control.h"

namespace cpudist::server {

void Sequencer::make_room(uint32_t rank) {
  const std::lock_guard lock(mutex_);
  if (rank >= streams_.size()) streams_.resize(size_t{rank} + 1);
}

void Sequencer::bind(uint32_t rank, uint32_t incarnation, Link connection, bool anew) noexcept {
  const std::lock_guard lock(mutex_);
  Stream& stream = streams_[rank];
  if (anew) {
    const CarriedOut before = stream.done.sequence > 0 ? stream.done : stream.before;
    stream = Stream{};
    stream.before = before;
  }
  stream.incarnation = stream.done.incarnation = incarnation;
  stream.connection = std::move(connection);
}

void Sequencer::unbind(uint32_t rank, const Link& connection) {
  const std::lock_guard lock(mutex_);
  Stream& stream = streams_[rank];
  if (stream.connection == connection) stream.connection.reset();
}

uint64_t Sequencer::last_sequence(uint32_t rank) const {
  const std::lock_guard lock(mutex_);
  return streams_[rank].last_sequence;
}

uint64_t Sequencer::carried_out_before(uint32_t rank) const {
  const std::lock_guard lock(mutex_);
  return streams_[rank].before.sequence;
}

void Sequencer::note_carried_out(const Ticket& ticket) {
  Stream& stream = streams_[ticket.rank];
  for (CarriedOut* some : {&stream.done, &stream.before}) {
    if (some->incarnation != ticket.incarnation) continue;
    some->sequence = std::max(some->sequence, ticket.sequence);
    return;
  }
}

void Sequencer::refuse(uint32_t rank, SharedPayload error, bool drop) noexcept {
  const std::lock_guard lock(mutex_);
  Stream& stream = streams_[rank];
  if (drop) stream.received.reset();
  stream.refused = std::move(error);
}

Admission Sequencer::admit(const Link& connection, const wire::FrameHeader& header, Ticket* ticket,
                           Outbox& outbox) {
  const std::lock_guard lock(mutex_);
  Stream& stream = streams_[header.rank];
  *ticket = Ticket{header.rank, header.incarnation, header.sequence};
  // A takeover may have happened since the frame's sender was identified.
  if (stream.incarnation != header.incarnation) return Admission::kHandled;
  if (stream.refused) {  // its connection is being closed
    outbox.add(connection, outbox.reply_header(header, wire::FrameKind::kError), stream.refused);
    return Admission::kRefused;
  }
  if (header.sequence <= stream.last_sequence) {
    counters_.duplicates.fetch_add(1);
    if (header.sequence == stream.last_sequence && stream.last_payload) {
      repeat_reply(stream, connection, header, outbox);
    }
    return Admission::kHandled;
  }
  if (header.sequence != stream.last_sequence + 1) {
    const std::string expected = std::to_string(stream.last_sequence + 1);
    outbox.answer(connection, header,
                  Error(ErrorCode::kProtocol, "sequence gap: expected request " + expected +
                                                  " of trainer " + std::to_string(header.rank) +
                                                  ", found " + std::to_string(header.sequence)));
    return Admission::kRefused;
  }
  if (stream.received) {
    counters_.duplicates.fetch_add(1);
    stream.received->header.request_id = header.request_id;
    return Admission::kHandled;
  }
  stream.received = Received{header.sequence, header};
  return Admission::kNew;
}

const Sequencer::Received* Sequencer::current(const Ticket& ticket) const {
  const Stream& stream = streams_[ticket.rank];
  const bool same = stream.incarnation == ticket.incarnation && stream.received &&
                    stream.received->sequence == ticket.sequence;
  return same ? &*stream.received : nullptr;
}

void Sequencer::repeat_reply(const Stream& stream, const Link& connection,
                             const wire::FrameHeader& request, Outbox& outbox) {
  wire::FrameHeader reply = stream.last_header;
  reply.request_id = request.request_id;
  outbox.add(connection, reply, stream.last_payload);
}

bool Sequencer::is_current(const Ticket& ticket) const {
  const std::lock_guard lock(mutex_);
  return current(ticket) != nullptr;
}

void Sequencer::finish(const Ticket& ticket, wire::FrameKind kind, Answer answer, Outbox& outbox) {
  const std::lock_guard lock(mutex_);
  // Also of one that was counted as lost, or replaced, while it was done.
  if (kind != wire::FrameKind::kError) note_carried_out(ticket);
  const Received* received = current(ticket);
  if (received == nullptr) return;
  Stream& stream = streams_[ticket.rank];
  // What others are told of it, it is told in the words that are for it.
  if (stream.refused && kind == wire::FrameKind::kError) answer = Answer(stream.refused);
  stream.last_header = outbox.reply_header(received->header, kind);
  stream.last_header.coded = answer.coded;
  stream.last_sequence = ticket.sequence;
  stream.last_payload = std::move(answer.payload);
  stream.received.reset();
  if (!stream.connection) return;
  try {
    outbox.add(stream.connection, stream.last_header, stream.last_payload);
  } catch (const std::bad_alloc&) {
    // It is recorded: whoever waits for it asks.
  }
}

void Sequencer::finish(const Ticket& ticket, Buffer payload, Outbox& outbox) {
  finish(ticket, wire::FrameKind::kReply,
         Answer(std::make_shared<const Buffer>(std::move(payload))), outbox);
}

void Sequencer::finish(const Ticket& ticket, const Error& error, Outbox& outbox) {
  auto payload = payload_of(error);
  finish(ticket, wire::FrameKind::kError, Answer(std::move(payload)), outbox);
}

void Sequencer::reject(const Ticket& ticket, SharedPayload error, Outbox& outbox) noexcept {
  const std::lock_guard lock(mutex_);
  const Received* received = current(ticket);
  if (received == nullptr) return;
  Stream& stream = streams_[ticket.rank];
  const wire::FrameHeader header = outbox.reply_header(received->header, wire::FrameKind::kError);
  stream.received.reset();
  if (!stream.connection) return;
  try {
    outbox.add(stream.connection, header, std::move(error));
  } catch (const std::bad_alloc&) {
    // Whoever waits for it asks, is told that nobody knows of it, and sends it again.
  }
}

void Sequencer::reject(const Ticket& ticket, const Error& error, Outbox& outbox) {
  reject(ticket, payload_of(error), outbox);
}

void Sequencer::ask_again(const Ticket& ticket, Outbox& outbox) {
  const std::lock_guard lock(mutex_);
  const Received* received = current(ticket);
  if (received == nullptr) return;
  Stream& stream = streams_[ticket.rank];
  const auto header = outbox.reply_header(received->header, wire::FrameKind::kProbeReply);
  stream.received.reset();
  if (stream.connection) outbox.add(stream.connection, header, encode(wire::ProbeReply{}));
}

void Sequencer::forget(const Ticket& ticket) {
  const std::lock_guard lock(mutex_);
  if (current(ticket) != nullptr) streams_[ticket.rank].received.reset();
}

ProbeResult Sequencer::probe(const Link& connection, const wire::FrameHeader& header,
                             Outbox& outbox) {
  const std::lock_guard lock(mutex_);
  const Stream& stream = streams_[header.rank];
  ProbeResult result;
  if (stream.incarnation != header.incarnation || header.sequence < stream.last_sequence) {
    result.state = ProbeResult::State::kOld;
  } else if (header.sequence == stream.last_sequence && stream.last_payload) {
    counters_.duplicates.fetch_add(1);
    repeat_reply(stream, connection, header, outbox);
    result.state = ProbeResult::State::kAnswered;
  } else if (stream.received && stream.received->sequence == header.sequence) {
    result.state = ProbeResult::State::kWaiting;
    result.kind = stream.received->header.kind;
    result.param_set = stream.received->header.param_set;
  }
  return result;
}

}  // namespace cpudist::server
