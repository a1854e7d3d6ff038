// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/set_cut.h"

#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "server/peers.h"
#include "server/sequencer.h"
#include "server/snapshot/writer.h"
#include "wire/malformed.h"

namespace cpudist::server {

wire::Cut SetCut::decode(const Buffer& payload) {
  wire::Cut cut = wire::decode_frame([&] { return wire::decode_cut(payload.bytes()); });
  if (cut.number == 0 || !(cut.name.empty() || wire::is_snapshot_name(cut.name))) {
    throw Error(ErrorCode::kInvalidArgument,
                "a cut needs a number above 0, and a name of letters a-z, digits, '-' and '.', "
                "found number " +
                    std::to_string(cut.number) + " and name '" + cut.name + "'");
  }
  return cut;
}

std::string SetCut::still_writing(const wire::CutReply& last) const {
  if (last.number == 0) return {};
  const wire::CutStatus status = state_.shared.snapshots.status(state_.id, last.number, {});
  if (status.state != wire::CutState::kWriting) return {};
  return "snapshot " + last.name + " is still being written";
}

bool SetCut::take(const Ticket& ticket, const wire::Cut& cut, const std::string& writing,
                  Outbox& outbox) {
  ServerShared& shared = state_.shared;
  Markers& markers = state_.markers;
  std::optional<std::string> refusal = markers.refusal(cut);
  if (!refusal && !markers.open() && !writing.empty()) refusal = writing;
  wire::CutReply reply;
  reply.number = cut.number;
  reply.name = cut.name;
  reply.reason = refusal.value_or("");
  if (refusal) {
    markers.refuse(cut.number);
    shared.sequencer.finish(ticket, encode(reply), outbox);
    return false;
  }
  const bool announced = cut.step == wire::CutStep::kAnnounce;
  if (announced) {
    markers.announce(ticket.rank, cut, Clock::now());
  } else {
    markers.mark(ticket, cut, Clock::now());
  }
  shared.peers.wake_by(markers.deadline());
  if (announced) shared.sequencer.finish(ticket, encode(reply), outbox);
  return !announced;
}

void SetCut::take_back(uint32_t rank, uint64_t number, Outbox& outbox) {
  Markers& markers = state_.markers;
  // Made first: without memory for it the marker stays.
  wire::CutReply reply;
  reply.number = number;
  reply.name = markers.name();
  reply.taken_back = true;
  reply.reason = "trainer " + std::to_string(rank) + " has not waited longer for trainers";
  for (const uint32_t missing : markers.missing()) {
    if (missing != rank) reply.reason += ' ' + std::to_string(missing);
  }
  Buffer payload = encode(reply);
  const std::optional<Ticket> ticket = markers.take_back(rank, number);
  if (ticket) state_.shared.sequencer.finish(*ticket, std::move(payload), outbox);
}

wire::CutReply SetCut::abandon(uint32_t rank, uint64_t number, Outbox& outbox) {
  wire::CutReply reply;
  reply.number = number;
  reply.reason = "trainer " + std::to_string(rank) + " has abandoned it";
  state_.markers.refuse(number);
  if (state_.markers.number() == number) end(reply, outbox);
  return reply;
}

wire::CutReply SetCut::reply_of_open() const {
  wire::CutReply reply;
  reply.number = state_.markers.number();
  reply.name = state_.markers.name();
  return reply;
}

void SetCut::try_now(std::shared_mutex& mutex, Outbox& outbox) {
  const Markers& markers = state_.markers;
  if (!markers.open()) return;
  if (state_.broken) return fail(*state_.broken, outbox);
  wire::CutReply reply = reply_of_open();
  if (markers.deserted()) {
    reply.reason = "the trainer that asked for it takes no part any more";
    return end(reply, outbox);
  }
  if (!markers.complete()) return;
  reply.digest = markers.digest();
  try {
    state_.shared.snapshots.begin(
        {state_.id, reply.number, reply.name, markers.marked(), markers.base()},
        {state_.store, state_.layout, state_.version, state_.gone}, mutex);
    state_.shared.memory.trim();  // what is spare goes before what a snapshot takes
    reply.taken = true;
    last_ = reply;
  } catch (const std::bad_alloc&) {
    reply.reason = "server " + std::to_string(state_.shared.options.shard_id) +
                   " has no memory for the snapshot";
  } catch (const Error& error) {
    reply.reason = error.what();
  }
  end(reply, outbox);
}

void SetCut::end(const wire::CutReply& reply, Outbox& outbox) {
  const auto payload = std::make_shared<const Buffer>(encode(reply));
  for (const auto& [rank, ticket] : state_.markers.end()) {
    state_.shared.sequencer.finish(ticket, wire::FrameKind::kReply, payload, outbox);
  }
}

void SetCut::fail(const Error& error, Outbox& outbox) {
  if (!state_.markers.open()) return;
  for (const auto& [rank, ticket] : state_.markers.end()) {
    state_.shared.sequencer.finish(ticket, error, outbox);
  }
}

void SetCut::give_up(TimePoint now, Outbox& outbox) {
  const Markers& markers = state_.markers;
  if (!markers.open()) return;
  if (now < markers.deadline()) {
    state_.shared.peers.wake_by(markers.deadline());  // another set's was due
    return;
  }
  wire::CutReply reply = reply_of_open();
  reply.reason = "given up on server " + std::to_string(state_.shared.options.shard_id) +
                 ": no marker in time from trainers";
  for (const uint32_t rank : markers.missing()) {
    reply.reason += ' ';
    reply.reason += std::to_string(rank);
  }
  if (markers.name().empty()) reply.reason += " and who asked for it";
  end(reply, outbox);
}

}  // namespace cpudist::server
