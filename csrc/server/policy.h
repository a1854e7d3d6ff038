// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// When the updates of a parameter set are applied, and which trainers wait for which. A set has one
// policy, as its layout says.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "server/options.h"
#include "server/outbox.h"
#include "server/state.h"
#include "server/update/push.h"
#include "wire/messages.h"

namespace cpudist::server {

// Thread safety: called with the lock of the set held: shared for const members, else exclusively.
// Members that take a ticket answer it, now or later, or throw Error.
class UpdatePolicy {
 public:
  virtual ~UpdatePolicy() = default;

  // Whether nobody gets on without one of the trainers: what one fails at, all fail at.
  virtual bool needs_everyone() const = 0;
  // Whether trainers send a push again by themselves that was refused for lack of memory. One that
  // never fits is then to be refused for good. Any thread, without the lock.
  virtual bool sends_again() const = 0;
  // The next round of `rank`, or the updates so far.
  virtual uint64_t round_of(uint32_t rank) const = 0;
  // Whom a waiting request of `rank` waits for.
  virtual std::vector<uint32_t> waiting_for(wire::FrameKind kind, uint32_t rank) const = 0;

  // ---- who takes part ----
  // Throws for a trainer that cannot take part any more, or never could.
  virtual void check_open(uint32_t rank) const = 0;
  // The set is ready, and `rank` has all values as of now.
  virtual void start(uint32_t rank) = 0;
  virtual void join(const Ticket& ticket, const wire::Join& join, Outbox& outbox) = 0;
  // `rank` takes no part until it joins, or a barrier has ended.
  virtual void take_out(uint32_t rank, Outbox& outbox) = 0;
  // What `rank` has read does not count any more: it has left, or closed the set.
  virtual void forget(uint32_t rank) = 0;
  // Forgets all that an older incarnation of `rank`, or a lost one, left here.
  virtual void drop(uint32_t rank, Outbox& outbox) = 0;
  // The end of a barrier: these take part again.
  virtual void add_members(const std::set<uint32_t>& ranks) = 0;
  // `rank` has marked a cut and may wait for others on any server: nobody waits for its next push.
  virtual void excuse(uint32_t rank, Outbox& outbox) = 0;
  // Answers everything that waits.
  virtual void fail_waiting(const Error& error, Outbox& outbox) = 0;

  // ---- updates ----
  // Throws for a push out of turn, or one that does not fit what the set was opened with.
  virtual void check_push(const Ticket& ticket, const wire::PushHeader& header) const = 0;
  // Whether a push of `rank` may be applied at once and others may be waiting for that.
  virtual bool is_due(uint32_t rank) const = 0;
  virtual void push(Push push, Outbox& outbox) = 0;
  virtual bool has_pushes() const = 0;  // that wait
  // A push of `rank` can never come: answers those who wait for it.
  virtual void give_up(uint32_t rank, const Error& error, Outbox& outbox) = 0;
  virtual void commit(const Ticket& ticket, const Buffer& payload, Outbox& outbox) = 0;

  // ---- values ----
  virtual void values_stored() = 0;
  // These rows have lost their records. Does not throw.
  virtual void rows_freed(const table::Table& table, std::span<const table::Freed> rows) = 0;
  // The set has had so many updates, with the values that were loaded; nothing waits.
  virtual void set_round(uint64_t round) = 0;
  // These are about to be sent in reply to a pull for gradient `step`; may be rounded to what
  // `dtype` can say.
  virtual void note_rows(const wire::FrameHeader& request, uint64_t step,
                         const wire::PullTable& pull, wire::WireDType dtype, float* rows) const = 0;
  virtual void note_dense(const wire::FrameHeader& request, uint64_t step, wire::WireDType dtype,
                          Buffer* values) const = 0;
  virtual void add_stats(ServerStats* stats) const = 0;
};

class Replies;

// Makes what a layout asks for, where `members` take part. The state outlives what is made.
struct Modes {
  std::unique_ptr<UpdatePolicy> (*make_policy)(ParamState& state,
                                               const std::set<uint32_t>& members);
  std::unique_ptr<Replies> (*make_replies)(const ParamState& state,
                                           const std::set<uint32_t>& members);
};

}  // namespace cpudist::server
