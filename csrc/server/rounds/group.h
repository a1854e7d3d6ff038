// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The rounds of one group of trainers: who is a member, whose push is there, and when a round is
// complete and applied. A set that is updated in rounds has one group of all its trainers (Sync) or
// several, which do not wait for each other (HalfAsync); docs/mechanisms.md, "Rounds".
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/state.h"
#include "server/update/update.h"

namespace cpudist::server {

// Thread safety: called with the lock of the set held: shared for const members, else exclusively.
// Members that take a ticket answer it, now or later, or throw Error.
class RoundGroup {
 public:
  // `alone`: no other group updates the set, so that its members have the values that no round of
  // theirs touched.
  RoundGroup(ParamState& state, std::set<uint32_t> ranks, bool alone)
      : state_(state),
        ranks_(std::move(ranks)),
        alone_(alone),
        update_(state.store, state.shared.updates, state.shared.memory.row_memory()) {}
  RoundGroup(const RoundGroup&) = delete;
  RoundGroup& operator=(const RoundGroup&) = delete;

  uint64_t round() const { return round_; }
  // Throws kProtocol for a push out of turn.
  void check_push(uint32_t rank, uint64_t round) const;
  void push(Push push, Outbox& outbox);
  bool has_pushes() const { return !pushes_.empty() || !early_.empty(); }
  // No push is there: the next round is this one.
  void set_round(uint64_t round) {
    round_ = round;
    committed_ = {};
  }
  // A push of `rank` can never come: answers the others of its round.
  void give_up(uint32_t rank, const Error& error, Outbox& outbox);
  void commit(const Ticket& ticket, const Buffer& payload, Outbox& outbox);

  // Those of `ranks` that belong here take part from the current round on; no join is under way.
  void add_members(const std::set<uint32_t>& ranks);
  void take_out(uint32_t rank, Outbox& outbox);
  void join(const Ticket& ticket, const wire::Join& join, Outbox& outbox);
  // Forgets what an older incarnation of `rank` left waiting.
  void drop(uint32_t rank, Outbox& outbox);
  // Answers everything that waits.
  void fail_waiting(const SharedPayload& error, Outbox& outbox);

  // Whom a waiting request of `waits` waits for.
  std::vector<uint32_t> waiting_for(wire::FrameKind kind, uint32_t waits) const;
  // Whose pushes its rounds take.
  std::vector<uint32_t> participants() const;

 private:
  enum class Phase { kCollect, kCommit };
  struct WaitingCommit {
    Ticket ticket;
    std::vector<double> norms;
  };
  struct Await {  // of a joining trainer, until all others have pushed for a round
    Ticket ticket;
    uint64_t pushed = 0;  // that round
    uint64_t named = 0;   // the round at which it joins
  };
  struct Told {  // to everybody when a round that clips has been merged
    size_t norm_count = 0;
    SharedPayload payload;
  };
  struct Committed {  // the last two-phase round, for the commits that come after the first
    uint64_t round = 0;
    std::vector<double> norms;
    std::map<uint32_t, Answer> replies;  // of the ranks that have not sent theirs
  };

  bool is_early(uint32_t rank, uint64_t round) const;
  void check_norms(const Ticket& ticket, const std::vector<double>& given,
                   const std::vector<double>& expected) const;
  bool complete() const;
  std::optional<Error> find_fault() const;
  bool wants_commit() const { return pushes_.begin()->second.view.header.clip_norm > 0.0; }
  std::vector<uint32_t> missing() const;
  void try_complete(Outbox& outbox);
  bool prepare(Told* told, Outbox& outbox);
  void prepare_update(Told* told);
  void apply(const Told& told, Outbox& outbox);
  void begin_commit(const Told& told, Outbox& outbox);
  void apply_commit(Outbox& outbox);
  void end_round(Outbox& outbox);
  std::vector<uint32_t> blocks_of_reply() const;
  void fail_round(const SharedPayload& error, Outbox& outbox);
  void fail_commits(const SharedPayload& error, Outbox& outbox);
  void refuse_round(const std::exception& cause, Outbox& outbox) noexcept;
  void break_off(const std::exception& cause, Outbox& outbox);
  void advance_if_empty();
  void promote();
  void begin_join(const Ticket& ticket, const wire::Join& join, uint64_t round, Outbox& outbox);
  void release(const Ticket& ticket, Outbox& outbox);
  void forget_hold(uint32_t rank);
  uint64_t current_round_of_join(const std::string& who) const;
  bool must_wait(const Ticket& ticket, wire::JoinStep step) const;
  void next_hold(Outbox& outbox);
  void await_others(const Ticket& ticket, Outbox& outbox);
  void answer_awaits(Outbox& outbox);
  uint64_t next_free_round() const;

  ParamState& state_;
  const std::set<uint32_t> ranks_;
  const bool alone_;
  // Of each group its own: between the two phases of a round others may apply theirs.
  GradientUpdate update_;
  uint64_t round_ = 0;  // the next to be applied
  Phase phase_ = Phase::kCollect;
  std::set<uint32_t> members_;
  std::map<uint32_t, uint64_t> joining_;  // rank -> the round from which it is a member
  std::set<uint32_t> holders_;  // a joining trainer that keeps the round from being applied
  std::deque<std::pair<Ticket, wire::Join>> waiting_holds_;  // of one trainer at a time
  std::map<uint32_t, Await> awaits_;                         // by rank
  Pushes pushes_;
  Pushes early_;           // of joining trainers, for the round they join at
  size_t norm_count_ = 1;  // of the last two-phase round
  std::map<uint32_t, WaitingCommit> waiting_commits_;
  Committed committed_;
};

}  // namespace cpudist::server
