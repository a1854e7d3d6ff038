// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Exactly once. A request that changes state is known by (run, trainer, incarnation, server,
// sequence); run and server are this one's. It is *received* from the moment it is admitted until
// it is finished: its reply is recorded and queued for the trainer's current connection in the same
// step that lets the next number in.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/errors.h"
#include "server/counters.h"
#include "server/outbox.h"
#include "wire/messages.h"

namespace cpudist::server {

enum class Admission { kNew, kHandled, kRefused };

struct ProbeResult {
  enum class State { kAnswered, kWaiting, kUnknown, kOld } state = State::kUnknown;
  wire::FrameKind kind = wire::FrameKind::kError;  // of the waiting request
  uint32_t param_set = wire::kNoParamSet;
};

// Thread safety: all members; none sends a frame or calls out while its lock is held. Ranks are
// those of trainers that were bound.
class Sequencer {
 public:
  using Link = std::shared_ptr<transport::Connection>;

  Sequencer(uint32_t trainer_count, ServerCounters& counters)
      : counters_(counters), streams_(trainer_count) {}

  // ---- whose requests are taken, and where replies go ----
  // This incarnation of `rank` talks over this connection. `anew`: it is a newer one, which begins
  // at number 1.
  void bind(uint32_t rank, uint32_t incarnation, Link connection, bool anew) noexcept;
  // Before the first bind() of a rank that is not one of `trainer_count`.
  void make_room(uint32_t rank);
  void unbind(uint32_t rank, const Link& connection);
  uint64_t last_sequence(uint32_t rank) const;
  // See wire::Hello. Final once nothing that the older incarnation has asked for is being done.
  uint64_t carried_out_before(uint32_t rank) const;
  // Until a newer incarnation is bound, requests of `rank` are answered with this error, of
  // payload_of(). `drop`: what it left half done is not to happen.
  void refuse(uint32_t rank, SharedPayload error, bool drop) noexcept;

  // ---- requests ----
  // kNew: handle it, then finish or reject the ticket. Else there is nothing to do: kHandled is a
  // duplicate, kRefused answered with an error.
  Admission admit(const Link& connection, const wire::FrameHeader& header, Ticket* ticket,
                  Outbox& outbox);
  bool is_current(const Ticket& ticket) const;
  // Records the reply and queues it. Does nothing for a ticket that is no longer current. The first
  // of them needs no memory that it could not do without.
  void finish(const Ticket& ticket, wire::FrameKind kind, Answer answer, Outbox& outbox);
  void finish(const Ticket& ticket, Buffer payload, Outbox& outbox);
  void finish(const Ticket& ticket, const Error& error, Outbox& outbox);
  // Answers without recording: the same number may come again. `error` is of payload_of().
  void reject(const Ticket& ticket, SharedPayload error, Outbox& outbox) noexcept;
  void reject(const Ticket& ticket, const Error& error, Outbox& outbox);
  // As if it had not come, and its sender is told so at once.
  void ask_again(const Ticket& ticket, Outbox& outbox);
  void forget(const Ticket& ticket);  // as if it had never come
  // The recorded reply is queued where there is one.
  ProbeResult probe(const Link& connection, const wire::FrameHeader& header, Outbox& outbox);

 private:
  struct Received {
    uint64_t sequence = 0;
    wire::FrameHeader header;
  };
  // What happened, whether or not there was still somebody to be told.
  struct CarriedOut {
    uint32_t incarnation = 0;
    uint64_t sequence = 0;  // 0: nothing
  };
  struct Stream {  // of one trainer
    uint32_t incarnation = 0;
    Link connection;
    uint64_t last_sequence = 0;
    CarriedOut done;
    CarriedOut before;  // of the last incarnation before this one that has had something done
    wire::FrameHeader last_header;
    SharedPayload last_payload;
    std::optional<Received> received;
    SharedPayload refused;
  };

  // With the lock held.
  const Received* current(const Ticket& ticket) const;
  void note_carried_out(const Ticket& ticket);
  void repeat_reply(const Stream& stream, const Link& connection, const wire::FrameHeader& request,
                    Outbox& outbox);

  ServerCounters& counters_;
  mutable std::mutex mutex_;
  std::vector<Stream> streams_;
};

}  // namespace cpudist::server
