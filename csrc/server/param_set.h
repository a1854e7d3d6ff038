// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One parameter set on one server: its tables and blocks, the groups of trainers that update it,
// and the requests that wait. docs/mechanisms.md, "Rounds" and "Updates on arrival", is what this
// implements.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "server/delay_compensator.h"
#include "server/rounds/group.h"
#include "server/state.h"
#include "wire/messages.h"

namespace cpudist::server {

// A payload that is not what its kind says: its sender's connection is closed, nothing is recorded.
class MalformedFrame : public Error {
 public:
  explicit MalformedFrame(const Error& error) : Error(error.code(), error.what()) {}
};

template <typename Decode>
auto decode_frame(Decode&& decode) {
  try {
    return decode();
  } catch (const Error& error) {
    throw MalformedFrame(error);
  }
}

inline std::span<const uint8_t> bytes_of(const Buffer& payload) {
  return {payload.data(), payload.size()};
}

// Thread safety: every public member locks for itself. Members that take a ticket answer it, now or
// later, or throw Error, which the caller records as the answer (kOverloaded: rejects with it), or
// MalformedFrame.
class ParamSet {
 public:
  // `opener` sent `layout_bytes` first; `active` are the trainers that take part: not those that
  // have said goodbye.
  ParamSet(uint32_t id, Buffer layout_bytes, uint32_t opener, const std::vector<uint32_t>& active,
           ServerShared& shared);
  ~ParamSet();

  void open(const Ticket& ticket, const Buffer& layout_bytes, Outbox& outbox);
  void store(const Ticket& ticket, const Buffer& payload, Outbox& outbox);
  void ready(const Ticket& ticket, Outbox& outbox);
  void push(const Ticket& ticket, Buffer payload, bool coded, Outbox& outbox);
  // For a push that was dropped for lack of memory: throws kOverloaded, or kInvalidArgument if it
  // would be sent again for ever.
  [[noreturn]] void refuse_push(uint64_t size_bytes) const;
  void commit(const Ticket& ticket, const wire::Commit& commit, Outbox& outbox);
  void leave(const Ticket& ticket, Outbox& outbox);
  void join(const Ticket& ticket, const wire::Join& join, Outbox& outbox);
  void close(const Ticket& ticket, Outbox& outbox);

  Buffer pull_rows(const wire::FrameHeader& request, const Buffer& payload) const;
  Buffer pull_dense(const wire::FrameHeader& request, const Buffer& payload) const;
  Buffer fetch(const Buffer& payload) const;

  // A barrier or a goodbye: leave without an answer.
  void remove_member(uint32_t rank, Outbox& outbox);
  // The end of a barrier: `ranks`, less those that have closed this set, take part again.
  void reset_members(const std::vector<uint32_t>& ranks);
  // True when each of the trainers that may still come has closed it.
  bool unused(const std::vector<uint32_t>& remaining) const;
  void mark_closed(uint32_t rank, Outbox& outbox);
  // A trainer is lost: answers everything that waits for it. On arrival the others go on without.
  void lose(uint32_t rank, const Error& error, Outbox& outbox);
  // Answers everything that waits.
  void fail_waiting(const Error& error, Outbox& outbox);
  // Forgets what an older incarnation of `rank` left waiting.
  void drop(uint32_t rank, Outbox& outbox);
  // Whom a waiting request of `rank` waits for.
  std::vector<uint32_t> waiting_for(wire::FrameKind kind, uint32_t rank) const;
  // The next round of the group of `rank`; on arrival the updates so far.
  uint64_t round_of(uint32_t rank) const;
  bool in_rounds() const { return !on_arrival(); }
  void add_stats(ServerStats* stats) const;

 private:
  // All of these are called with mutex_ held exclusively.
  void make_groups(const std::set<uint32_t>& members);
  void refuse_all(const Error& error, Outbox& outbox);
  void require_open(uint32_t rank) const;
  void require_ready() const;
  void require_not_lost() const;
  void require_whole() const;
  void check_push(const Ticket& ticket, const wire::PushHeader& header, uint64_t size_bytes) const;
  void check_configs(const wire::PushHeader& header) const;
  // Makes a coded push a plain one, under the memory cap. Without the lock.
  void decode_push_into(RoundPush* push) const;
  void take_out(uint32_t rank, Outbox& outbox);
  // In rounds: the group of `rank`. Null for ranks that no group holds, of trainers that came later
  // and never opened this set.
  RoundGroup* find_group(uint32_t rank) const;
  // Runs `action` on the group of `rank`, if it has one. What breaks the set is told to all groups.
  template <typename Action>
  void in_group(uint32_t rank, Outbox& outbox, Action&& action);
  uint64_t round_for(uint32_t rank) const;
  void answer_round(const Ticket& ticket, Outbox& outbox) const {
    state_.answer_round(ticket, round_for(ticket.rank), outbox);
  }
  // ---- updates on arrival ----
  bool on_arrival() const { return state_.layout.mode == wire::UpdateMode::kOnArrival; }
  bool bounded() const { return state_.layout.max_staleness != wire::kAnyStaleness; }
  void add_arrival(RoundPush push, Outbox& outbox);
  void add_reader(uint32_t rank);
  bool may_apply(uint32_t rank) const;
  void apply_arrivals(Outbox& outbox);
  void apply_arrival(uint32_t rank, Outbox& outbox);
  void drop_arrival(uint32_t rank, Outbox& outbox);
  void fail_arrivals(const Error& error, Outbox& outbox);
  std::vector<uint32_t> oldest_readers() const;

  const Buffer layout_bytes_;
  const uint32_t opener_;

  mutable std::shared_mutex mutex_;
  ParamState state_;
  std::set<uint32_t> opened_;
  std::set<uint32_t> closed_;
  std::map<uint32_t, Ticket> waiting_ready_;
  std::vector<std::unique_ptr<RoundGroup>> groups_;  // in rounds
  // ---- updates on arrival ----
  RoundUpdate update_;
  const std::unique_ptr<DelayCompensator> compensator_;  // null without delay compensation
  RoundPushes arrivals_;
  // With a bound on staleness: rank -> update after which it read the values of its next gradient.
  std::map<uint32_t, uint64_t> readers_;
};

template <typename Action>
void ParamSet::in_group(uint32_t rank, Outbox& outbox, Action&& action) {
  RoundGroup* const group = find_group(rank);
  if (group == nullptr) return;
  action(*group);
  if (!state_.broken) return;
  for (const auto& other : groups_) other->fail_waiting(*state_.broken, outbox);
}

}  // namespace cpudist::server
