// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/rounds/rounds.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/layout/layout_checks.h"
#include "server/replies.h"

namespace cpudist::server {

Rounds::Rounds(ParamState& state, const std::set<uint32_t>& members) : state_(state) {
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

RoundGroup* Rounds::find_group(uint32_t rank) const {
  if (rank >= state_.shared.options.trainer_count) return nullptr;
  const std::vector<uint32_t>& group_of = state_.layout.trainer_groups;
  return groups_[group_of.empty() ? 0 : group_of[rank]].get();
}

template <typename Action>
void Rounds::in_group(uint32_t rank, Outbox& outbox, Action&& action) {
  RoundGroup* const group = find_group(rank);
  if (group == nullptr) return;
  action(*group);
  if (!state_.broken) return;
  const SharedPayload error = state_.broken_payload();
  for (const auto& other : groups_) other->fail_waiting(error, outbox);
}

uint64_t Rounds::round_of(uint32_t rank) const {
  const RoundGroup* group = find_group(rank);
  return group == nullptr ? state_.version.round : group->round();
}

std::vector<uint32_t> Rounds::waiting_for(wire::FrameKind kind, uint32_t rank) const {
  const RoundGroup* group = find_group(rank);
  return group == nullptr ? std::vector<uint32_t>{} : group->waiting_for(kind, rank);
}

void Rounds::check_open(uint32_t rank) const {
  // A round without a trainer that may come back would have a smaller divisor.
  if (const auto lost = state_.shared.peers.find_lost()) throw *lost;
  if (rank < state_.shared.options.trainer_count) return;
  throw Error(ErrorCode::kConfigMismatch,
              "trainer " + std::to_string(rank) + " joins a run of " +
                  std::to_string(state_.shared.options.trainer_count) +
                  " trainers (CPUDIST_TRAINERS) in parameter set " + std::to_string(state_.id) +
                  ", whose rounds wait for exactly those; only Async takes more");
}

void Rounds::join(const Ticket& ticket, const wire::Join& join, Outbox& outbox) {
  in_group(ticket.rank, outbox, [&](RoundGroup& group) { group.join(ticket, join, outbox); });
}

void Rounds::take_out(uint32_t rank, Outbox& outbox) {
  in_group(rank, outbox, [&](RoundGroup& group) { group.take_out(rank, outbox); });
}

void Rounds::drop(uint32_t rank, Outbox& outbox) {
  in_group(rank, outbox, [&](RoundGroup& group) { group.drop(rank, outbox); });
}

void Rounds::add_members(const std::set<uint32_t>& ranks) {
  for (const auto& group : groups_) group->add_members(ranks);
}

void Rounds::fail_waiting(const Error& error, Outbox& outbox) {
  const SharedPayload payload = payload_of(error);
  for (const auto& group : groups_) group->fail_waiting(payload, outbox);
}

void Rounds::check_push(const Ticket& ticket, const wire::PushHeader& header) const {
  if (const RoundGroup* group = find_group(ticket.rank)) {
    group->check_push(ticket.rank, header.round);
  }
  check_configs(state_.layout, header);
  state_.replies->check_push(header);
  require_not_lost();
}

// In all groups: the job ends with the trainer, and what the others train meanwhile is lost.
void Rounds::require_not_lost() const {
  std::vector<uint32_t> ranks;
  for (const auto& group : groups_) {
    const std::vector<uint32_t> more = group->participants();
    ranks.insert(ranks.end(), more.begin(), more.end());
  }
  if (const auto lost = state_.shared.peers.find_lost(ranks)) throw *lost;
}

void Rounds::push(Push push, Outbox& outbox) {
  const uint32_t rank = push.ticket.rank;
  in_group(rank, outbox, [&](RoundGroup& group) { group.push(std::move(push), outbox); });
}

bool Rounds::has_pushes() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const auto& group) { return group->has_pushes(); });
}

void Rounds::set_round(uint64_t round) {
  if (groups_.size() == 1) groups_.front()->set_round(round);
}

void Rounds::give_up(uint32_t rank, const Error& error, Outbox& outbox) {
  in_group(rank, outbox, [&](RoundGroup& group) { group.give_up(rank, error, outbox); });
}

void Rounds::commit(const Ticket& ticket, const Buffer& payload, Outbox& outbox) {
  in_group(ticket.rank, outbox, [&](RoundGroup& group) { group.commit(ticket, payload, outbox); });
}

}  // namespace cpudist::server
