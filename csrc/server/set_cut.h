// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a parameter set does with markers of a cut on one server: takes or refuses them, hands the
// values over to be written once all have come, and answers who waits. Who takes part and when all
// have marked are the rules of Markers; docs/mechanisms.md, "The cut".
#pragma once

#include <cstdint>
#include <shared_mutex>
#include <string>

#include "base/clock.h"
#include "server/outbox.h"
#include "server/state.h"
#include "wire/cut.h"

namespace cpudist::server {

// Thread safety: that of the set, whose lock is held: shared for const members, else exclusively.
// still_writing and decode take no lock.
class SetCut {
 public:
  explicit SetCut(ParamState& state) : state_(state) {}

  // Throws MalformedFrame, and kInvalidArgument for a number or name that no cut has.
  static wire::Cut decode(const Buffer& payload);
  const wire::CutReply& last() const { return last_; }  // that was taken
  // Why nothing can be cut before what was cut as `last` is written; empty if it is.
  std::string still_writing(const wire::CutReply& last) const;

  // A marker, or the announcement of one. Returns whether all may have marked now: a marker that is
  // refused, and an announcement, have been answered.
  bool take(const Ticket& ticket, const wire::Cut& cut, const std::string& writing, Outbox& outbox);
  // The marker of `rank` is answered if it waits for others; the cut stays open.
  void take_back(uint32_t rank, uint64_t number, Outbox& outbox);
  // Nobody is to mark it any more. Returns what its ticket is answered.
  wire::CutReply abandon(uint32_t rank, uint64_t number, Outbox& outbox);
  // Whenever a marker comes or somebody goes: takes the cut if all have marked. What is written
  // later is read under `mutex`, which is that of the set.
  void try_now(std::shared_mutex& mutex, Outbox& outbox);
  void fail(const Error& error, Outbox& outbox);  // if one is open
  void give_up(TimePoint now, Outbox& outbox);    // if it has waited long enough

 private:
  wire::CutReply reply_of_open() const;
  void end(const wire::CutReply& reply, Outbox& outbox);

  ParamState& state_;
  wire::CutReply last_;
};

}  // namespace cpudist::server
