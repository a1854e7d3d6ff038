// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Who takes part in the rounds of a parameter set: leaving, joining, barriers and lost trainers.

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/param_set.h"

namespace cpudist::core {

void ParamSet::leave(const Ticket& ticket, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  take_out(ticket.rank, outbox);
  answer_round(ticket, round_, outbox);
}

void ParamSet::remove_member(uint32_t rank, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  take_out(rank, outbox);
}

void ParamSet::take_out(uint32_t rank, Outbox& outbox) {
  members_.erase(rank);
  joining_.erase(rank);
  holders_.erase(rank);
  readers_.erase(rank);
  try_complete(outbox);
  advance_if_empty();
  try_complete(outbox);
}

void ParamSet::advance_if_empty() {
  // Everybody left before the round for which somebody joined: no push for the rounds up to there
  // can come from anywhere, on any server.
  if (!members_.empty() || !pushes_.empty() || joining_.empty()) return;
  uint64_t next = joining_.begin()->second;
  for (const auto& [rank, round] : joining_) next = std::min(next, round);
  round_ = std::max(round_, next);
  promote();
}

void ParamSet::promote() {
  for (auto entry = joining_.begin(); entry != joining_.end();) {
    if (entry->second > round_) {
      ++entry;
      continue;
    }
    members_.insert(entry->first);
    if (auto push = early_.extract(entry->first)) pushes_.insert(std::move(push));
    entry = joining_.erase(entry);
  }
}

void ParamSet::join(const Ticket& ticket, const Join& join, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  const std::string who = "trainer " + std::to_string(ticket.rank);
  if (!shared_.peers.is_current(ticket)) return;
  if (on_arrival()) {
    members_.insert(ticket.rank);
    add_reader(ticket.rank);
    answer_round(ticket, round_, outbox);
    return;
  }
  if (join.step == JoinStep::kRelease) {
    if (holders_.erase(ticket.rank) == 0) {
      throw Error(ErrorCode::kProtocol, who + " releases a round that it does not hold");
    }
    answer_round(ticket, round_, outbox);
    try_complete(outbox);
    return;
  }
  if (members_.contains(ticket.rank) || joining_.contains(ticket.rank)) {
    throw Error(ErrorCode::kProtocol, who + " joins, but it has not left");
  }
  uint64_t named = join.round;
  if (join.step == JoinStep::kHold) {
    if (shared_.options.shard_id != 0) {
      throw Error(ErrorCode::kInvalidArgument, "only server 0 names the round of a join");
    }
    holders_.insert(ticket.rank);
    named = members_.empty() ? round_ : round_ + 1;
  } else if (named < round_) {
    throw Error(ErrorCode::kProtocol, who + " joins at round " + std::to_string(named) +
                                          ", which is over: the current one is " +
                                          std::to_string(round_));
  }
  joining_[ticket.rank] = named;
  promote();
  advance_if_empty();
  answer_round(ticket, named, outbox);
}

void ParamSet::reset_members(const std::vector<uint32_t>& ranks) {
  const std::unique_lock lock(mutex_);
  joining_.clear();
  holders_.clear();
  for (const uint32_t rank : ranks) {
    if (closed_.contains(rank)) continue;
    members_.insert(rank);
  }
}

void ParamSet::require_not_lost() const {
  std::vector<uint32_t> ranks(members_.begin(), members_.end());
  for (const auto& [rank, round] : joining_) ranks.push_back(rank);
  ranks.insert(ranks.end(), holders_.begin(), holders_.end());
  if (const auto lost = shared_.peers.find_lost(ranks)) throw *lost;
}

void ParamSet::lose(uint32_t rank, const Error& error, Outbox& outbox) {
  if (!on_arrival()) {
    fail_waiting(error, outbox);
    return;
  }
  drop(rank, outbox);
  const std::unique_lock lock(mutex_);
  if (rank != 0 || ready_) return;
  for (const auto& [other, ticket] : waiting_ready_) shared_.peers.finish(ticket, error, outbox);
  waiting_ready_.clear();
}

void ParamSet::fail_waiting(const Error& error, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  if (phase_ == Phase::kCollect) fail_round(error, outbox);
  for (const auto& [rank, push] : early_) {
    shared_.counters.pending_bytes.fetch_sub(push.payload.size());
    shared_.peers.finish(push.ticket, error, outbox);
  }
  early_.clear();
  for (const auto& [rank, ticket] : waiting_ready_) shared_.peers.finish(ticket, error, outbox);
  for (const auto& [rank, waiting] : waiting_commits_) {
    shared_.peers.finish(waiting.ticket, error, outbox);
  }
  waiting_ready_.clear();
  waiting_commits_.clear();
}

void ParamSet::drop(uint32_t rank, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  waiting_ready_.erase(rank);
  waiting_commits_.erase(rank);
  holders_.erase(rank);
  opened_.erase(rank);
  closed_.erase(rank);
  readers_.erase(rank);
  changed_rows_.forget(rank);
  if (on_arrival()) members_.erase(rank);
  const auto push = pushes_.find(rank);
  if (phase_ == Phase::kCollect && push != pushes_.end()) {
    shared_.counters.pending_bytes.fetch_sub(push->second.payload.size());
    pushes_.erase(push);
  }
  if (const auto early = early_.extract(rank)) {
    shared_.counters.pending_bytes.fetch_sub(early.mapped().payload.size());
  }
  try_complete(outbox);  // it may have held the round
}

std::vector<uint32_t> ParamSet::waiting_for(FrameKind kind) const {
  const std::shared_lock lock(mutex_);
  if (kind == FrameKind::kReady) return {0};
  if (on_arrival()) return oldest_readers();
  std::vector<uint32_t> ranks;
  if (kind == FrameKind::kPush && phase_ == Phase::kCollect) ranks = missing();
  for (const uint32_t rank : holders_) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<uint32_t> ParamSet::missing() const {
  std::vector<uint32_t> ranks;
  for (const uint32_t rank : members_) {
    if (!pushes_.contains(rank)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace cpudist::core
