// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Who takes part in the rounds of a group: leaving, joining, barriers and lost trainers.

#include <algorithm>
#include <string>
#include <utility>

#include "server/rounds/group.h"

namespace cpudist::server {

void RoundGroup::add_members(const std::set<uint32_t>& ranks) {
  joining_.clear();
  holders_.clear();
  for (const uint32_t rank : ranks) {
    if (ranks_.contains(rank)) members_.insert(rank);
  }
}

void RoundGroup::take_out(uint32_t rank, Outbox& outbox) {
  members_.erase(rank);
  joining_.erase(rank);
  holders_.erase(rank);
  try_complete(outbox);
  advance_if_empty();
  try_complete(outbox);
}

void RoundGroup::advance_if_empty() {
  // Everybody left before the round for which somebody joined: no push for the rounds up to there
  // can come from anywhere, on any server.
  if (!members_.empty() || !pushes_.empty() || joining_.empty()) return;
  uint64_t next = joining_.begin()->second;
  for (const auto& [rank, round] : joining_) next = std::min(next, round);
  if (next > round_) {
    state_.version.round += next - round_;  // it counts the rounds of all groups, empty ones too
    round_ = next;
  }
  promote();
}

void RoundGroup::promote() {
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

void RoundGroup::join(const Ticket& ticket, const wire::Join& join, Outbox& outbox) {
  const std::string who = "trainer " + std::to_string(ticket.rank);
  if (join.step == wire::JoinStep::kRelease) {
    if (holders_.erase(ticket.rank) == 0) {
      throw Error(ErrorCode::kProtocol, who + " releases a round that it does not hold");
    }
    state_.answer_round(ticket, round_, outbox);
    try_complete(outbox);
    return;
  }
  if (members_.contains(ticket.rank) || joining_.contains(ticket.rank)) {
    throw Error(ErrorCode::kProtocol, who + " joins, but it has not left");
  }
  uint64_t named = join.round;
  if (join.step == wire::JoinStep::kHold) {
    if (state_.shared.options.shard_id != 0) {
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
  state_.answer_round(ticket, named, outbox);
}

std::vector<uint32_t> RoundGroup::participants() const {
  std::vector<uint32_t> ranks(members_.begin(), members_.end());
  for (const auto& [rank, round] : joining_) ranks.push_back(rank);
  ranks.insert(ranks.end(), holders_.begin(), holders_.end());
  return ranks;
}

void RoundGroup::fail_waiting(const Error& error, Outbox& outbox) {
  if (phase_ == Phase::kCollect) fail_round(error, outbox);
  for (const auto& [rank, push] : early_) {
    state_.shared.peers.finish(push.ticket, error, outbox);
  }
  state_.release(early_);
  early_.clear();
  for (const auto& [rank, waiting] : waiting_commits_) {
    state_.shared.peers.finish(waiting.ticket, error, outbox);
  }
  waiting_commits_.clear();
}

void RoundGroup::drop(uint32_t rank, Outbox& outbox) {
  waiting_commits_.erase(rank);
  holders_.erase(rank);
  RoundPushes dropped;
  if (phase_ == Phase::kCollect) dropped.insert(pushes_.extract(rank));
  state_.release(dropped);
  dropped.clear();
  dropped.insert(early_.extract(rank));
  state_.release(dropped);
  try_complete(outbox);  // it may have held the round
}

std::vector<uint32_t> RoundGroup::waiting_for(wire::FrameKind kind) const {
  std::vector<uint32_t> ranks;
  if (kind == wire::FrameKind::kPush && phase_ == Phase::kCollect) ranks = missing();
  for (const uint32_t rank : holders_) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace cpudist::server
