// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The groups of a parameter set, and what concerns all of them: membership, barriers and lost
// trainers.

#include <mutex>
#include <utility>

#include "server/change_log.h"
#include "server/param_set.h"

namespace cpudist::server {

void ParamSet::make_groups(const std::set<uint32_t>& members) {
  const std::vector<uint32_t>& group_of = state_.layout.trainer_groups;
  std::vector<std::set<uint32_t>> groups(1);
  for (uint32_t rank = 0; rank < state_.shared.options.trainer_count; ++rank) {
    const size_t group = group_of.empty() ? 0 : group_of[rank];
    if (group >= groups.size()) groups.resize(group + 1);
    groups[group].insert(rank);
  }
  for (const std::set<uint32_t>& ranks : groups) {
    groups_.push_back(std::make_unique<RoundGroup>(state_, ranks, groups.size() == 1));
    groups_.back()->add_members(members);
  }
}

RoundGroup* ParamSet::find_group(uint32_t rank) const {
  if (on_arrival() || rank >= state_.shared.options.trainer_count) return nullptr;
  const std::vector<uint32_t>& group_of = state_.layout.trainer_groups;
  return groups_[group_of.empty() ? 0 : group_of[rank]].get();
}

uint64_t ParamSet::round_for(uint32_t rank) const {
  const RoundGroup* group = find_group(rank);
  return group == nullptr ? state_.version.round : group->round();
}

uint64_t ParamSet::round_of(uint32_t rank) const {
  const std::shared_lock lock(mutex_);
  return round_for(rank);
}

void ParamSet::leave(const Ticket& ticket, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  take_out(ticket.rank, outbox);
  if (compensator_) compensator_->forget(ticket.rank);
  answer_round(ticket, outbox);
}

void ParamSet::remove_member(uint32_t rank, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  take_out(rank, outbox);
}

void ParamSet::take_out(uint32_t rank, Outbox& outbox) {
  readers_.erase(rank);
  if (state_.changes) state_.changes->remove_member(rank);
  if (on_arrival()) apply_arrivals(outbox);
  in_group(rank, outbox, [&](RoundGroup& group) { group.take_out(rank, outbox); });
}

void ParamSet::join(const Ticket& ticket, const wire::Join& join, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  if (!state_.shared.sequencer.is_current(ticket)) return;
  if (state_.changes) state_.changes->add_member(ticket.rank);
  if (on_arrival()) {
    add_reader(ticket.rank);
    answer_round(ticket, outbox);
    return;
  }
  in_group(ticket.rank, outbox, [&](RoundGroup& group) { group.join(ticket, join, outbox); });
}

void ParamSet::reset_members(const std::vector<uint32_t>& ranks) {
  const std::unique_lock lock(mutex_);
  std::set<uint32_t> members;
  for (const uint32_t rank : ranks) {
    if (closed_.contains(rank)) continue;
    members.insert(rank);
    if (state_.changes) state_.changes->add_member(rank);
  }
  for (const auto& group : groups_) group->add_members(members);
}

// In all groups: the job ends with the trainer, and what the others train meanwhile is lost.
void ParamSet::require_not_lost() const {
  std::vector<uint32_t> ranks;
  for (const auto& group : groups_) {
    const std::vector<uint32_t> more = group->participants();
    ranks.insert(ranks.end(), more.begin(), more.end());
  }
  if (const auto lost = state_.shared.peers.find_lost(ranks)) throw *lost;
}

void ParamSet::lose(uint32_t rank, const Error& error, Outbox& outbox) {
  if (in_rounds()) {
    fail_waiting(error, outbox);
    return;
  }
  drop(rank, outbox);
  const std::unique_lock lock(mutex_);
  if (rank != 0 || state_.ready) return;
  for (const auto& [other, ticket] : waiting_ready_) {
    state_.shared.sequencer.finish(ticket, error, outbox);
  }
  waiting_ready_.clear();
}

void ParamSet::fail_waiting(const Error& error, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  for (const auto& group : groups_) group->fail_waiting(error, outbox);
  fail_arrivals(error, outbox);
  for (const auto& [rank, ticket] : waiting_ready_) {
    state_.shared.sequencer.finish(ticket, error, outbox);
  }
  waiting_ready_.clear();
}

void ParamSet::drop(uint32_t rank, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  waiting_ready_.erase(rank);
  opened_.erase(rank);
  closed_.erase(rank);
  if (state_.changes) state_.changes->forget(rank);
  if (compensator_) compensator_->forget(rank);
  if (on_arrival()) drop_arrival(rank, outbox);
  in_group(rank, outbox, [&](RoundGroup& group) { group.drop(rank, outbox); });
}

std::vector<uint32_t> ParamSet::waiting_for(wire::FrameKind kind, uint32_t rank) const {
  const std::shared_lock lock(mutex_);
  if (kind == wire::FrameKind::kReady) return {0};
  if (on_arrival()) return oldest_readers();
  const RoundGroup* group = find_group(rank);
  return group == nullptr ? std::vector<uint32_t>{} : group->waiting_for(kind);
}

}  // namespace cpudist::server
