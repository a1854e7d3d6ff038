// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One parameter set on one server: its tables and blocks, who has it open, and what is read and
// stored. When updates are applied is its policy's; docs/mechanisms.md, "Rounds" and "Updates on
// arrival".
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "server/policy.h"
#include "server/set_cut.h"
#include "server/state.h"
#include "wire/messages.h"
#include "wire/snapshot/load.h"

namespace cpudist::server {

// Thread safety: every public member locks for itself. Members that take a ticket answer it, now or
// later, or throw Error, which the caller records as the answer (kOverloaded: rejects with it), or
// MalformedFrame.
class ParamSet {
 public:
  // `opener` sent `layout_bytes` first; `active` are the trainers that take part: not those that
  // have said goodbye. `modes` has what the layout asks for.
  ParamSet(uint32_t id, Buffer layout_bytes, uint32_t opener, const std::vector<uint32_t>& active,
           ServerShared& shared, const Modes& modes);
  ~ParamSet();
  ParamSet(const ParamSet&) = delete;
  ParamSet& operator=(const ParamSet&) = delete;

  void open(const Ticket& ticket, const Buffer& layout_bytes, Outbox& outbox);
  // Stores all of it or, with an Error, nothing.
  void store(const Ticket& ticket, const Buffer& payload, Outbox& outbox);
  void store_run(const Ticket& ticket, const Buffer& payload, Outbox& outbox);
  // Rows of a file of a snapshot, or the version that they are of. Where it fails nothing has
  // changed, but that of a table whose rows were dropped before: nothing of the set can be used
  // until they are loaded from the first on.
  void load(const Ticket& ticket, const Buffer& payload, Outbox& outbox);
  void ready(const Ticket& ticket, Outbox& outbox);
  void push(const Ticket& ticket, Buffer payload, bool coded, Outbox& outbox);
  // Dense gradients of the next push of `rank`, before it.
  void take_part(uint32_t rank, Buffer payload) {
    const std::shared_lock lock(mutex_);
    require_open(rank);
    if (!state_.takes_parts()) throw Error(ErrorCode::kProtocol, "a set that takes no parts");
    ServerShared& shared = state_.shared;
    parts_.keep(rank, std::move(payload), state_.layout, shared.options.shard_id, shared.counters);
  }
  // For a push that was dropped for lack of memory: throws as ServerMemory::refuse.
  [[noreturn]] void refuse_push(const Ticket& ticket, uint64_t size_bytes, Outbox& outbox);
  void commit(const Ticket& ticket, const Buffer& payload, Outbox& outbox);
  void leave(const Ticket& ticket, Outbox& outbox);
  void join(const Ticket& ticket, const wire::Join& join, Outbox& outbox);
  void close(const Ticket& ticket, Outbox& outbox);
  // The marker of `rank` is answered if it waits for others; the cut stays open.
  void take_marker_back(uint32_t rank, uint64_t number, Outbox& outbox);
  // A marker of a snapshot's cut, or what else is asked of one. Answered when the cut is taken or
  // given up.
  void cut(const Ticket& ticket, const Buffer& payload, Outbox& outbox);
  void give_up_cut(TimePoint now, Outbox& outbox);  // if it has waited long enough
  std::vector<uint32_t> taking_part() const;        // in a cut of now

  Buffer pull_rows(const wire::FrameHeader& request, const Buffer& payload) const;
  Buffer pull_dense(const wire::FrameHeader& request, const Buffer& payload) const;
  Buffer fetch(const Buffer& payload) const;
  Buffer fetch_run(const Buffer& payload) const;
  Buffer table_counts(const Buffer& payload) const;
  // Frees rows of a table as its spec says, all that are to go now. Others push and pull meanwhile,
  // and this waits for a snapshot to get on where too much is kept for it.
  void shrink(const Ticket& ticket, const Buffer& payload, Outbox& outbox);

  // A barrier or a goodbye: leave without an answer.
  void remove_member(uint32_t rank, Outbox& outbox);
  // The end of a barrier: `ranks`, less those that have closed this set, take part again.
  void reset_members(const std::vector<uint32_t>& ranks);
  // True when each of the trainers that may still come has closed it.
  bool unused(const std::vector<uint32_t>& remaining) const;
  void mark_closed(uint32_t rank, Outbox& outbox);
  // A trainer is lost: answers everything that waits for it. The others go on if they can.
  void lose(uint32_t rank, const Error& error, Outbox& outbox);
  // Answers everything that waits.
  void fail_waiting(const Error& error, Outbox& outbox);
  // Forgets what an older incarnation of `rank` left waiting.
  void drop(uint32_t rank, Outbox& outbox);
  // Whom a waiting request of `rank` waits for.
  std::vector<uint32_t> waiting_for(wire::FrameKind kind, uint32_t rank) const;
  // The next round of `rank`, or the updates so far.
  uint64_t round_of(uint32_t rank) const {
    const std::shared_lock lock(mutex_);
    return policy_->round_of(rank);
  }
  // Of all values that were ever sent to be stored; any thread, also while some are stored.
  uint64_t stored_bytes() const { return stored_bytes_.load(); }
  bool needs_everyone() const { return policy_->needs_everyone(); }
  void add_stats(ServerStats* stats) const;
  void add_table_stats(std::vector<TableStats>* tables) const;

 private:
  void make_store();
  // These are called with mutex_ held, those that are not const exclusively.
  void check_same_layout(const Ticket& ticket, const wire::ParamSetLayout& other,
                         const Buffer& layout_bytes, Outbox& outbox);
  bool is_same_layout(const wire::ParamSetLayout& other, const Buffer& layout_bytes) const;
  void keep_seeds(const Ticket& ticket, const wire::ParamSetLayout& layout);
  void require_open(uint32_t rank) const;
  void require_ready() const;
  void require_whole() const;
  void require_averages(uint64_t step) const;  // throws kProtocol if `step` asks and there are none
  void check_store(const wire::StoreView& view) const;
  bool has_to_fit(const table::Table& table) const;
  // Throws kFull or kOverloaded where the cap leaves no room for rows of remote tables that are to
  // be stored.
  void check_room(const wire::StoreView& view) const;
  void check_room(const table::Table& table, const std::vector<int64_t>& absent) const;
  // Values that came in a payload of that size: check() throws, or apply() puts them in place.
  void store_values(const Ticket& ticket, uint64_t size_bytes, const std::function<void()>& check,
                    const std::function<void()>& apply, Outbox& outbox);
  void load_rows(const Ticket& ticket, const wire::Load& load, uint64_t size_bytes, Outbox& outbox);
  void check_load(const wire::Load& load, const table::RowColumns& rows) const;
  void note_failed_load(const wire::Load& load, const std::exception& cause);
  static void check_storer(const Ticket& ticket);
  void check_blocks_stored() const;
  void start(const Ticket& ticket, Outbox& outbox);
  void check_push(const Ticket& ticket, const wire::PushHeader& header, uint64_t size_bytes) const;
  void take_out(uint32_t rank, Outbox& outbox);
  void fail_ready(const Error& error, Outbox& outbox);
  void check_marker(const Ticket& ticket) const;
  void answer_round(const Ticket& ticket, Outbox& outbox) const {
    state_.answer_round(ticket, policy_->round_of(ticket.rank), outbox);
  }
  // Looks for gradients that are infinite or NaN, and does what is to be done with them.
  void check_finite(Push* push) const;
  // Makes a coded push a plain one, under the memory cap. Without the lock.
  void decode_push_into(Push* push) const;
  void take_push(const Ticket& ticket, Buffer payload, bool coded, Outbox& outbox);
  [[noreturn]] void refuse(uint64_t size_bytes) const;
  void give_up(const Ticket& ticket, const Error& error, Outbox& outbox);

  const Buffer layout_bytes_;
  const uint32_t opener_;

  mutable std::shared_mutex mutex_;
  ParamState state_;
  SetCut cut_{state_};
  std::set<uint32_t> opened_;
  bool has_seeds_ = false;  // of trainer 0; they stay, whoever comes back
  std::set<uint32_t> closed_;
  std::map<uint32_t, Ticket> waiting_ready_;
  std::atomic<uint64_t> stored_bytes_ = 0;
  std::set<uint32_t> dropped_;             // tables whose rows a load has dropped
  std::map<uint32_t, Error> half_loaded_;  // those of them that could not get their new ones
  PushParts parts_;
  std::unique_ptr<UpdatePolicy> policy_;
};

}  // namespace cpudist::server
