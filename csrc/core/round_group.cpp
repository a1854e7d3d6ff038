// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Pushes and commits of a group. The thread that completes a round applies it.

#include "core/round_group.h"

#include <cmath>
#include <string>
#include <utility>

#include "core/change_log.h"

namespace cpudist::core {

bool RoundGroup::is_early(uint32_t rank, uint64_t round) const {
  const auto joining = joining_.find(rank);
  return joining != joining_.end() && joining->second == round;
}

void RoundGroup::check_push(uint32_t rank, uint64_t round) const {
  if (is_early(rank, round)) return;
  if (!members_.contains(rank)) {
    throw Error(ErrorCode::kProtocol, "push of trainer " + std::to_string(rank) +
                                          ", which is not a member of round " +
                                          std::to_string(round_));
  }
  if (round != round_ || pushes_.contains(rank)) {
    throw Error(ErrorCode::kProtocol, "push of trainer " + std::to_string(rank) + " for round " +
                                          std::to_string(round) + ", but the current one is " +
                                          std::to_string(round_) +
                                          (pushes_.contains(rank) ? ", already pushed" : ""));
  }
}

void RoundGroup::push(RoundPush push, Outbox& outbox) {
  const uint32_t rank = push.ticket.rank;
  const bool early = joining_.contains(rank);  // its round is the next one
  (early ? early_ : pushes_).emplace(rank, std::move(push));
  if (!early) try_complete(outbox);
}

bool RoundGroup::complete() const {
  return holders_.empty() && !pushes_.empty() && missing().empty();
}

std::vector<uint32_t> RoundGroup::missing() const {
  std::vector<uint32_t> ranks;
  for (const uint32_t rank : members_) {
    if (!pushes_.contains(rank)) ranks.push_back(rank);
  }
  return ranks;
}

void RoundGroup::try_complete(Outbox& outbox) {
  if (phase_ == Phase::kCommit) {
    if (!holders_.empty() || waiting_commits_.empty()) return;
    apply_commit(waiting_commits_.begin()->second.total_norm, outbox);
    return;
  }
  if (!complete()) return;
  if (const auto mismatch = find_mismatch(pushes_)) {
    fail_round(
        Error(ErrorCode::kConfigMismatch, "round " + std::to_string(round_) + ": " + *mismatch),
        outbox);
    return;
  }
  try {
    if (pushes_.begin()->second.view.header.clip_norm > 0.0) {
      begin_commit(outbox);
      return;
    }
    if (!RoundUpdate::is_void(pushes_)) update_.apply(pushes_, state_.version.round);
    end_round(outbox);
  } catch (const std::exception& error) {
    break_off(error, outbox);
  }
}

void RoundGroup::begin_commit(Outbox& outbox) {
  const double squared_norm = RoundUpdate::is_void(pushes_) ? 0.0 : update_.merge(pushes_);
  phase_ = Phase::kCommit;
  for (const auto& [rank, push] : pushes_) {
    state_.shared.peers.finish(push.ticket, encode(PushNorm{round_, squared_norm}), outbox);
  }
}

void RoundGroup::check_norm(const Ticket& ticket, double given, double expected) const {
  if (given == expected || (std::isnan(given) && std::isnan(expected))) return;
  throw Error(ErrorCode::kProtocol, "commit of trainer " + std::to_string(ticket.rank) + ": norm " +
                                        std::to_string(given) + ", another trainer's is " +
                                        std::to_string(expected));
}

void RoundGroup::commit(const Ticket& ticket, const Commit& commit, Outbox& outbox) {
  if (commit.round + 1 == round_ && committed_.reply != nullptr &&
      committed_.round == commit.round && committed_.ranks.contains(ticket.rank)) {
    check_norm(ticket, commit.total_norm, committed_.total_norm);
    committed_.ranks.erase(ticket.rank);
    state_.shared.peers.finish(ticket, FrameKind::kReply, committed_.reply, outbox);
    return;
  }
  if (phase_ != Phase::kCommit || commit.round != round_ || !pushes_.contains(ticket.rank)) {
    throw Error(ErrorCode::kProtocol, "commit of trainer " + std::to_string(ticket.rank) +
                                          " for round " + std::to_string(commit.round) +
                                          ", which waits for none: the current one is " +
                                          std::to_string(round_));
  }
  if (!waiting_commits_.empty()) {
    check_norm(ticket, commit.total_norm, waiting_commits_.begin()->second.total_norm);
  }
  if (!state_.shared.peers.is_current(ticket)) return;
  waiting_commits_[ticket.rank] = {ticket, commit.total_norm};
  try_complete(outbox);
}

void RoundGroup::apply_commit(double total_norm, Outbox& outbox) {
  try {
    if (!RoundUpdate::is_void(pushes_)) {
      update_.apply_merged(pushes_, total_norm, state_.version.round);
    }
  } catch (const std::exception& error) {
    break_off(error, outbox);
    return;
  }
  committed_ = {};
  committed_.round = round_;
  committed_.total_norm = total_norm;
  for (const auto& [rank, push] : pushes_) committed_.ranks.insert(rank);
  end_round(outbox);
}

SharedPayload RoundGroup::reply() const {
  // Other groups may have updated any block since this one's last reply.
  if (!alone_) return state_.dense_reply(state_.every_block());
  if (RoundUpdate::is_void(pushes_)) return state_.dense_reply({});
  return state_.dense_reply(update_.touched_blocks());
}

void RoundGroup::end_round(Outbox& outbox) {
  ++round_;
  state_.count_update(pushes_);
  if (state_.changes) state_.changes->note(pushes_);
  const SharedPayload payload = state_.changes ? nullptr : reply();
  if (phase_ == Phase::kCommit) {
    committed_.reply = payload;
    for (const auto& [rank, waiting] : waiting_commits_) {
      committed_.ranks.erase(rank);
      state_.shared.peers.finish(waiting.ticket, FrameKind::kReply, payload, outbox);
    }
    waiting_commits_.clear();
  } else {
    for (const auto& [rank, push] : pushes_) {
      state_.shared.peers.finish(push.ticket, FrameKind::kReply,
                                 state_.changes ? state_.changes->reply(rank) : payload, outbox);
    }
  }
  clear_pushes();
  phase_ = Phase::kCollect;
  promote();
  advance_if_empty();
  try_complete(outbox);  // with the early pushes of those who have just become members
}

void RoundGroup::break_off(const std::exception& cause, Outbox& outbox) {
  state_.break_off(cause);
  for (const auto& [rank, waiting] : waiting_commits_) {
    state_.shared.peers.finish(waiting.ticket, *state_.broken, outbox);
  }
  waiting_commits_.clear();
  phase_ = Phase::kCollect;
  fail_round(*state_.broken, outbox);
}

void RoundGroup::fail_round(const Error& error, Outbox& outbox) {
  for (const auto& [rank, push] : pushes_) {
    state_.shared.peers.finish(push.ticket, error, outbox);
  }
  clear_pushes();
}

void RoundGroup::clear_pushes() {
  state_.release(pushes_);
  pushes_.clear();
}

}  // namespace cpudist::core
