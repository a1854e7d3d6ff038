// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one class
//
// Pushes and commits of a group, and who takes part in its rounds. The thread that completes a
// round applies it.

#include "server/rounds/group.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <string>
#include <utility>

#include "server/replies.h"
#include "wire/malformed.h"

namespace cpudist::server {

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

void RoundGroup::push(Push push, Outbox& outbox) {
  const uint32_t rank = push.ticket.rank;
  const bool early = joining_.contains(rank);  // its round is the next one
  (early ? early_ : pushes_).emplace(rank, std::move(push));
  if (early) return;
  try {
    try_complete(outbox);
  } catch (...) {  // its sender is told; it may push again
    pushes_.erase(rank);
    throw;
  }
}

void RoundGroup::give_up(uint32_t rank, const Error& error, Outbox& outbox) {
  if (phase_ == Phase::kCollect && members_.contains(rank)) fail_round(payload_of(error), outbox);
}

bool RoundGroup::complete() const {
  return holders_.empty() && !pushes_.empty() &&
         std::all_of(members_.begin(), members_.end(),
                     [this](uint32_t rank) { return pushes_.contains(rank); });
}

std::vector<uint32_t> RoundGroup::missing() const {
  std::vector<uint32_t> ranks;
  for (const uint32_t rank : members_) {
    if (!pushes_.contains(rank)) ranks.push_back(rank);
  }
  return ranks;
}

void RoundGroup::try_complete(Outbox& outbox) {
  answer_awaits(outbox);
  if (phase_ == Phase::kCommit) {
    if (!holders_.empty() || waiting_commits_.empty()) return;
    apply_commit(outbox);
    return;
  }
  if (!complete()) return;
  Told told;
  try {
    if (prepare(&told, outbox)) apply(told, outbox);
  } catch (const std::exception& error) {
    break_off(error, outbox);
  }
}

// Why pushes of this round cannot become one update.
std::optional<Error> RoundGroup::find_fault() const {
  if (const auto mismatch = find_mismatch(pushes_)) {
    return Error(ErrorCode::kConfigMismatch, "round " + std::to_string(round_) + ": " + *mismatch);
  }
  for (const auto& [rank, push] : pushes_) {
    if (!push.nonfinite.empty()) return Error(ErrorCode::kNonFinite, push.nonfinite);
  }
  return std::nullopt;
}

// All that may want memory before a value changes. False when the round cannot be applied: all of
// it are told, and may send their pushes again where there was no memory.
bool RoundGroup::prepare(Told* told, Outbox& outbox) {
  try {
    if (const auto error = find_fault()) {
      fail_round(payload_of(*error), outbox);
      return false;
    }
    try {
      prepare_update(told);
      return true;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kFull || error.code() == ErrorCode::kTableFull) {
        fail_round(payload_of(error), outbox);
      } else {
        refuse_round(error, outbox);
      }
    }
  } catch (const std::bad_alloc& error) {
    refuse_round(error, outbox);
  }
  return false;
}

void RoundGroup::prepare_update(Told* told) {
  const bool empty = GradientUpdate::is_void(pushes_);
  if (!empty) update_.prepare(pushes_);
  if (!wants_commit()) return;
  const bool each = pushes_.begin()->second.view.header.clip_each;
  told->norm_count = each ? state_.tensor_count : 1;
  wire::PushNorm norms{round_, std::vector<double>(told->norm_count)};
  const auto payload = std::make_shared<Buffer>(encode(norms));
  // From here on nothing fails: rows come into being, and pushes of keys are counted.
  if (!empty) update_.merge(pushes_, norms.squared_norms);
  encode_again(norms, payload.get());
  told->payload = payload;
}

void RoundGroup::apply(const Told& told, Outbox& outbox) {
  if (wants_commit()) {
    begin_commit(told, outbox);
    return;
  }
  if (!GradientUpdate::is_void(pushes_)) update_.apply(pushes_, state_.version.round);
  end_round(outbox);
}

void RoundGroup::begin_commit(const Told& told, Outbox& outbox) {
  norm_count_ = told.norm_count;
  state_.merged.push_back(&pushes_);
  phase_ = Phase::kCommit;
  for (const auto& [rank, push] : pushes_) {
    state_.shared.sequencer.finish(push.ticket, wire::FrameKind::kReply, Answer(told.payload),
                                   outbox);
  }
}

void RoundGroup::check_norms(const Ticket& ticket, const std::vector<double>& given,
                             const std::vector<double>& expected) const {
  for (size_t i = 0; i < norm_count_; ++i) {
    if (given[i] == expected[i] || (std::isnan(given[i]) && std::isnan(expected[i]))) continue;
    throw Error(ErrorCode::kProtocol, "commit of trainer " + std::to_string(ticket.rank) +
                                          ": norm " + std::to_string(given[i]) +
                                          ", another trainer's is " + std::to_string(expected[i]));
  }
}

void RoundGroup::commit(const Ticket& ticket, const Buffer& payload, Outbox& outbox) {
  wire::Commit commit =
      wire::decode_frame([&] { return wire::decode_commit(payload.bytes(), norm_count_); });
  const auto late = committed_.replies.find(ticket.rank);
  if (commit.round + 1 == round_ && committed_.round == commit.round &&
      late != committed_.replies.end()) {
    check_norms(ticket, commit.norms, committed_.norms);
    state_.shared.sequencer.finish(ticket, wire::FrameKind::kReply, late->second, outbox);
    committed_.replies.erase(late);
    return;
  }
  if (phase_ != Phase::kCommit || commit.round != round_ || !pushes_.contains(ticket.rank)) {
    throw Error(ErrorCode::kProtocol, "commit of trainer " + std::to_string(ticket.rank) +
                                          " for round " + std::to_string(commit.round) +
                                          ", which waits for none: the current one is " +
                                          std::to_string(round_));
  }
  if (!waiting_commits_.empty()) {
    check_norms(ticket, commit.norms, waiting_commits_.begin()->second.norms);
  }
  if (!state_.shared.sequencer.is_current(ticket)) return;
  waiting_commits_[ticket.rank] = {ticket, std::move(commit.norms)};
  try_complete(outbox);
}

void RoundGroup::apply_commit(Outbox& outbox) {
  std::vector<double>& norms = waiting_commits_.begin()->second.norms;  // equal in all
  try {
    if (!GradientUpdate::is_void(pushes_)) {
      update_.apply_merged(pushes_, norms, state_.version.round);
    }
    committed_ = {};
    committed_.round = round_;
    committed_.norms = std::move(norms);
    end_round(outbox);
  } catch (const std::exception& error) {
    break_off(error, outbox);
  }
}

std::vector<uint32_t> RoundGroup::blocks_of_reply() const {
  // Other groups may have updated any block since this one's last reply.
  if (!alone_) return state_.every_block();
  if (GradientUpdate::is_void(pushes_)) return {};
  return update_.touched_blocks();
}

void RoundGroup::end_round(Outbox& outbox) {
  ++round_;
  std::erase(state_.merged, &pushes_);
  state_.count_update(pushes_);
  state_.sweep(pushes_, [](const auto&, auto) {});
  state_.replies->note(pushes_);
  auto answers = state_.replies->answers(pushes_, blocks_of_reply());
  if (phase_ == Phase::kCommit) {
    committed_.replies = std::move(answers);
    for (const auto& [rank, waiting] : waiting_commits_) {
      const auto reply = committed_.replies.extract(rank);
      state_.shared.sequencer.finish(waiting.ticket, wire::FrameKind::kReply, reply.mapped(),
                                     outbox);
    }
    waiting_commits_.clear();
  } else {
    for (const auto& [rank, push] : pushes_) {
      state_.shared.sequencer.finish(push.ticket, wire::FrameKind::kReply, answers.at(rank),
                                     outbox);
    }
  }
  pushes_.clear();
  phase_ = Phase::kCollect;
  promote();
  advance_if_empty();
  next_hold(outbox);     // of who has waited for those who were joining
  try_complete(outbox);  // with the early pushes of those who have just become members
}

void RoundGroup::break_off(const std::exception& cause, Outbox& outbox) {
  const SharedPayload error = state_.break_off(cause);
  std::erase(state_.merged, &pushes_);
  fail_commits(error, outbox);
  phase_ = Phase::kCollect;
  fail_round(error, outbox);
}

void RoundGroup::fail_round(const SharedPayload& error, Outbox& outbox) {
  for (const auto& [rank, push] : pushes_) {
    state_.shared.sequencer.finish(push.ticket, wire::FrameKind::kError, Answer(error), outbox);
  }
  pushes_.clear();
}

void RoundGroup::fail_commits(const SharedPayload& error, Outbox& outbox) {
  for (const auto& [rank, waiting] : waiting_commits_) {
    state_.shared.sequencer.finish(waiting.ticket, wire::FrameKind::kError, Answer(error), outbox);
  }
  waiting_commits_.clear();
}

// Nothing of it was applied.
void RoundGroup::refuse_round(const std::exception& cause, Outbox& outbox) noexcept {
  const SharedPayload error = state_.refusal(cause);
  for (const auto& [rank, push] : pushes_) {
    state_.shared.sequencer.reject(push.ticket, error, outbox);
  }
  pushes_.clear();
}

// ---- who takes part ----

void RoundGroup::add_members(const std::set<uint32_t>& ranks) {
  joining_.clear();
  holders_.clear();
  awaits_.clear();
  for (const uint32_t rank : ranks) {
    if (ranks_.contains(rank)) members_.insert(rank);
  }
}

void RoundGroup::forget_hold(uint32_t rank) {
  holders_.erase(rank);
  awaits_.erase(rank);
  std::erase_if(waiting_holds_, [&](const auto& hold) { return hold.first.rank == rank; });
}

void RoundGroup::take_out(uint32_t rank, Outbox& outbox) {
  members_.erase(rank);
  joining_.erase(rank);
  forget_hold(rank);
  next_hold(outbox);
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

void RoundGroup::release(const Ticket& ticket, Outbox& outbox) {
  if (holders_.erase(ticket.rank) == 0) {
    throw Error(ErrorCode::kProtocol, "trainer " + std::to_string(ticket.rank) +
                                          " releases a round that it does not hold");
  }
  state_.answer_round(ticket, round_, outbox);
  next_hold(outbox);
  try_complete(outbox);
}

// Trainers join one at a time. Where nobody else takes part the holder may name the round before
// the next one's, and is not yet known to others, which would take that one's for the first that
// can come. Who joins with another set is named the round right after the present one: while
// another trainer has that, it waits for it to begin.
bool RoundGroup::must_wait(const Ticket& ticket, wire::JoinStep step) const {
  if (!holders_.empty() && !holders_.contains(ticket.rank)) return true;
  return step == wire::JoinStep::kHoldPushed && !joining_.empty();
}

uint64_t RoundGroup::current_round_of_join(const std::string& who) const {
  if (pushes_.empty() && joining_.empty()) return round_;
  throw Error(ErrorCode::kProtocol, who + " joins at the current round, " + std::to_string(round_) +
                                        ", which others have begun");
}

void RoundGroup::join(const Ticket& ticket, const wire::Join& join, Outbox& outbox) {
  using wire::JoinStep;
  if (join.step == JoinStep::kRelease) return release(ticket, outbox);
  if (join.step == JoinStep::kOthersPushed) return await_others(ticket, outbox);
  const std::string who = "trainer " + std::to_string(ticket.rank);
  if (members_.contains(ticket.rank) || joining_.contains(ticket.rank)) {
    throw Error(ErrorCode::kProtocol, who + " joins, but it has not left");
  }
  uint64_t named = join.round;
  if (join.step == JoinStep::kHold || join.step == JoinStep::kHoldPushed) {
    if (state_.shared.options.shard_id != 0) {
      throw Error(ErrorCode::kInvalidArgument, "only server 0 names the round of a join");
    }
    if (must_wait(ticket, join.step)) {
      if (const auto lost = state_.shared.peers.find_lost(participants())) throw *lost;
      waiting_holds_.emplace_back(ticket, join);
      return;
    }
    named = next_free_round();
  } else if (join.step == JoinStep::kCurrent) {
    named = current_round_of_join(who);
  } else if (named < round_) {
    throw Error(ErrorCode::kProtocol, who + " joins at round " + std::to_string(named) +
                                          ", which is over: the current one is " +
                                          std::to_string(round_));
  }
  begin_join(ticket, join, named, outbox);
}

void RoundGroup::begin_join(const Ticket& ticket, const wire::Join& join, uint64_t round,
                            Outbox& outbox) {
  const bool pushed = join.step == wire::JoinStep::kHoldPushed;
  if (pushed) {
    // Marked lost before those who wait are told: one of the two is seen.
    if (const auto lost = state_.shared.peers.find_lost(missing())) throw *lost;
  }
  try {
    joining_[ticket.rank] = round;
    if (pushed || join.step == wire::JoinStep::kHold) holders_.insert(ticket.rank);
    if (pushed) awaits_[ticket.rank] = {ticket, round_, round};
  } catch (...) {  // nobody joins half
    joining_.erase(ticket.rank);
    holders_.erase(ticket.rank);
    throw;
  }
  promote();
  advance_if_empty();
  if (pushed) {
    answer_awaits(outbox);
  } else {
    state_.answer_round(ticket, round, outbox);
  }
}

void RoundGroup::await_others(const Ticket& ticket, Outbox& outbox) {
  const auto joining = joining_.find(ticket.rank);
  if (joining == joining_.end() && !members_.contains(ticket.rank)) {
    throw Error(ErrorCode::kProtocol,
                "trainer " + std::to_string(ticket.rank) + " waits for others, but has not joined");
  }
  if (const auto lost = state_.shared.peers.find_lost(participants())) throw *lost;
  const uint64_t round = joining == joining_.end() ? round_ : joining->second;
  awaits_[ticket.rank] = {ticket, round, round};
  answer_awaits(outbox);
}

void RoundGroup::answer_awaits(Outbox& outbox) {
  for (auto entry = awaits_.begin(); entry != awaits_.end();) {
    const auto& [rank, await] = *entry;
    const auto there = [this, waits = rank](uint32_t member) {
      return member == waits || pushes_.contains(member);
    };
    const bool pushed = round_ == await.pushed && std::ranges::all_of(members_, there);
    if (round_ < await.pushed || (round_ == await.pushed && !pushed)) {
      ++entry;
      continue;
    }
    if (await.named > round_ && phase_ == Phase::kCollect) {
      // One that fails is pushed again, after another step of what is pushed before: the trainer
      // would join that one a step too early.
      if (const auto error = find_fault()) return fail_round(payload_of(*error), outbox);
    }
    state_.answer_round(await.ticket, await.named, outbox);
    entry = awaits_.erase(entry);
  }
}

// None that another server may have applied: members want an answer of this one for the round
// before it, and those that are joining may push theirs at once, whoever leaves meanwhile.
uint64_t RoundGroup::next_free_round() const {
  if (members_.empty() && joining_.empty()) return round_;
  uint64_t last = round_;
  for (const auto& [rank, round] : joining_) last = std::max(last, round);
  return last + 1;
}

// The next one that joins names its round now, before the present one may be over.
void RoundGroup::next_hold(Outbox& outbox) {
  while (holders_.empty() && !waiting_holds_.empty()) {
    const auto [ticket, next] = waiting_holds_.front();
    const bool current = state_.shared.sequencer.is_current(ticket);
    if (current && must_wait(ticket, next.step)) return;
    waiting_holds_.pop_front();
    if (!current) continue;
    try {
      join(ticket, next, outbox);
    } catch (const Error& error) {
      state_.shared.sequencer.finish(ticket, error, outbox);
    } catch (const std::exception& cause) {  // there is no memory; the others go on
      state_.shared.sequencer.finish(ticket, wire::FrameKind::kError, Answer(state_.refusal(cause)),
                                     outbox);
    }
  }
}

std::vector<uint32_t> RoundGroup::participants() const {
  std::vector<uint32_t> ranks(members_.begin(), members_.end());
  for (const auto& [rank, round] : joining_) ranks.push_back(rank);
  ranks.insert(ranks.end(), holders_.begin(), holders_.end());
  return ranks;
}

void RoundGroup::fail_waiting(const SharedPayload& error, Outbox& outbox) {
  if (phase_ == Phase::kCollect) fail_round(error, outbox);
  for (const auto& [rank, push] : early_) {
    state_.shared.sequencer.finish(push.ticket, wire::FrameKind::kError, Answer(error), outbox);
  }
  early_.clear();
  for (const auto& [ticket, join] : waiting_holds_) {
    state_.shared.sequencer.finish(ticket, wire::FrameKind::kError, Answer(error), outbox);
  }
  waiting_holds_.clear();
  for (const auto& [rank, await] : awaits_) {
    state_.shared.sequencer.finish(await.ticket, wire::FrameKind::kError, Answer(error), outbox);
  }
  awaits_.clear();
  fail_commits(error, outbox);
}

void RoundGroup::drop(uint32_t rank, Outbox& outbox) {
  waiting_commits_.erase(rank);
  forget_hold(rank);
  if (phase_ == Phase::kCollect) pushes_.erase(rank);
  early_.erase(rank);
  next_hold(outbox);
  try_complete(outbox);  // it may have held the round
}

std::vector<uint32_t> RoundGroup::waiting_for(wire::FrameKind kind, uint32_t waits) const {
  std::vector<uint32_t> ranks;
  const bool pushes =
      kind == wire::FrameKind::kPush || (kind == wire::FrameKind::kJoin && !awaits_.empty());
  if (pushes && phase_ == Phase::kCollect) ranks = missing();
  for (const uint32_t rank : holders_) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
  }
  std::erase(ranks, waits);  // who joins holds others, not itself
  return ranks;
}

}  // namespace cpudist::server
