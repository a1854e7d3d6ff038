// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The cut of a parameter set on one server: who takes part in it, who has marked it, and when all
// have. Rules only: what is cut and who is answered is the set's; docs/mechanisms.md, "The cut".
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "server/outbox.h"
#include "wire/cut.h"

namespace cpudist::server {

// One cut at a time. Thread safety: that of the set, whose lock is held: shared for const members,
// else exclusively.
class Markers {
 public:
  using Tickets = std::map<uint32_t, Ticket>;  // by rank

  // ---- who takes part ----
  void add(uint32_t rank);  // from now on, also in the cut that is open
  // It comes back, and takes part once a push of it is applied: those who have marked a cut, or are
  // about to, may be what its first push waits for.
  void join(uint32_t rank);
  void pushed(uint32_t rank, uint32_t incarnation);  // a push of it is applied: it takes part
  void take_out(uint32_t rank);                      // until it comes back
  // It is lost, or begins anew: its marker goes, and what servers have applied of it may differ.
  void drop(uint32_t rank);

  // ---- the cut ----
  // Why a marker or announcement cannot be taken; nothing if it can.
  std::optional<std::string> refusal(const wire::Cut& cut) const;
  // Both open the cut if it is not open. Throw std::bad_alloc, and nothing has changed.
  void announce(uint32_t rank, const wire::Cut& cut, TimePoint now);
  void mark(const Ticket& ticket, const wire::Cut& cut, TimePoint now);
  // Who waits for others takes his marker back, and may mark again; others' stay. Returns his
  // ticket; nothing if there is none.
  std::optional<Ticket> take_back(uint32_t rank, uint64_t number);
  bool open() const { return number_ != 0; }
  uint64_t number() const { return number_; }  // 0: none is open
  // What replies to pushes ask for: the number, or 0. Once a marker was taken back nobody is asked
  // before all who are missing have pushed since: else they would wait again for the same trainer,
  // which evaluates.
  uint64_t wanted() const;
  const std::string& name() const { return name_; }
  uint64_t base() const { return base_; }  // that a marker has named; 0: none has
  std::vector<uint32_t> members() const;   // ranks that take part
  std::vector<uint32_t> marked() const;    // ranks
  std::vector<uint32_t> missing() const;   // ranks that take part and have not marked
  // All who take part have marked, and so has who asked for it.
  bool complete() const;
  // Who asked for it has gone: it will never be complete.
  bool deserted() const { return deserted_; }
  TimePoint deadline() const { return deadline_; }  // of the open cut, to be given up then
  // Of all pushes that were applied, and of who has marked: docs/wire.md, "CutReply".
  uint64_t digest() const;
  // Closes it; nobody marks this number any more. Returns who waits for an answer.
  Tickets end();
  // Numbers begin anew: the version of the set was set.
  void restart() { ended_ = 0; }
  // Somebody was told that there is no cut of this number: nobody can mark it any more.
  void refuse(uint64_t number) { ended_ = std::max(ended_, number); }

 private:
  struct Pushes {
    uint32_t incarnation = 0;
    uint64_t count = 0;
    bool since = false;  // the last marker was taken back
  };

  void begin(uint32_t rank, const wire::Cut& cut, std::string name, TimePoint now) noexcept;

  std::set<uint32_t> members_;
  std::map<uint32_t, Pushes> pushes_;
  uint64_t number_ = 0;
  uint64_t ended_ = 0;  // the highest number that is over
  std::string name_;
  uint64_t base_ = 0;
  std::optional<uint32_t> opener_;  // who has named it
  bool opener_marked_ = false;
  bool taken_back_ = false;  // a marker of the open cut was
  bool deserted_ = false;
  TimePoint deadline_;
  Tickets tickets_;
};

}  // namespace cpudist::server
