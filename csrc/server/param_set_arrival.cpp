// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Updates on arrival: a push is applied as it comes, unless that would make the gradient that
// another trainer is computing older than max_staleness updates.

#include <algorithm>
#include <utility>

#include "server/change_log.h"
#include "server/param_set.h"

namespace cpudist::server {

void ParamSet::add_reader(uint32_t rank) {
  if (!on_arrival() || !bounded()) return;
  // Nobody's gradient may be held for ever: as many readers as the bound has room for.
  if (!readers_.contains(rank) && readers_.size() > state_.layout.max_staleness) {
    throw Error(ErrorCode::kConfigMismatch,
                "parameter set " + std::to_string(state_.id) +
                    " has max_staleness = " + std::to_string(state_.layout.max_staleness) +
                    ", which " + std::to_string(readers_.size()) + " trainers use up; trainer " +
                    std::to_string(rank) + " needs a larger one");
  }
  readers_[rank] = state_.version.round;
}

void ParamSet::add_arrival(RoundPush push, Outbox& outbox) {
  arrivals_.emplace(push.ticket.rank, std::move(push));
  apply_arrivals(outbox);
}

void ParamSet::drop_arrival(uint32_t rank, Outbox& outbox) {
  readers_.erase(rank);
  RoundPushes dropped;
  dropped.insert(arrivals_.extract(rank));
  state_.release(dropped);
  apply_arrivals(outbox);  // it may have held others
}

// Gradients are due `max_staleness` updates after their values were read. As long as the k-th of
// them, by due date, has room for the k before it, all can be applied in time; a push is held when
// applying it now would take that room from an earlier one. The earliest never is.
bool ParamSet::may_apply(uint32_t rank) const {
  if (!bounded()) return true;
  const auto own = readers_.find(rank);
  if (own == readers_.end()) return true;  // it has left: nobody vouches for what it read
  std::vector<uint64_t> earlier;
  for (const auto& [reader, read] : readers_) {
    if (read < own->second) earlier.push_back(read);
  }
  std::sort(earlier.begin(), earlier.end());
  for (size_t k = 0; k < earlier.size(); ++k) {
    // state_.version.round + 1 + k <= read + max_staleness, without an overflow.
    const uint64_t age = state_.version.round + 1 + k - earlier[k];
    if (age > state_.layout.max_staleness) return false;
  }
  return true;
}

void ParamSet::apply_arrivals(Outbox& outbox) {
  while (!state_.broken) {
    const auto due = [this](uint32_t rank) {
      const auto reader = readers_.find(rank);
      return reader == readers_.end() ? 0 : reader->second;
    };
    auto next = arrivals_.end();
    for (auto entry = arrivals_.begin(); entry != arrivals_.end(); ++entry) {
      if (!may_apply(entry->first)) continue;
      if (next == arrivals_.end() || due(entry->first) < due(next->first)) next = entry;
    }
    if (next == arrivals_.end()) return;
    apply_arrival(next->first, outbox);
  }
}

void ParamSet::apply_arrival(uint32_t rank, Outbox& outbox) {
  RoundPushes one;
  one.insert(arrivals_.extract(rank));
  const RoundPush& push = one.begin()->second;
  state_.release(one);
  try {
    if (compensator_) compensator_->begin(rank, push.view, state_.store);
    update_.apply(one, state_.version.round, compensator_.get());
    state_.count_update(one);
    if (readers_.contains(rank)) readers_[rank] = state_.version.round;
    if (state_.changes) {
      state_.changes->note(one);
      ParamState::CodedForms forms;
      state_.shared.sequencer.finish(push.ticket, wire::FrameKind::kReply,
                                     state_.form_of(state_.changes->reply(rank), push, &forms),
                                     outbox);
      return;
    }
    const bool all = push.view.header.want_dense;
    const auto blocks = all ? state_.every_block() : std::vector<uint32_t>();
    Buffer values = state_.dense_values(blocks);
    if (compensator_ && push.coding) state_.round_dense(&values, push.coding->reply);
    const auto reply = std::make_shared<const Buffer>(std::move(values));
    if (compensator_) {
      compensator_->end();
      if (!blocks.empty()) compensator_->note_dense_reply(rank, state_.version.round, *reply);
    }
    ParamState::CodedForms forms;
    state_.shared.sequencer.finish(push.ticket, wire::FrameKind::kReply,
                                   state_.form_of(reply, push, &forms), outbox);
  } catch (const std::exception& error) {
    state_.break_off(error);
    state_.shared.sequencer.finish(push.ticket, *state_.broken, outbox);
    fail_arrivals(*state_.broken, outbox);
  }
}

void ParamSet::fail_arrivals(const Error& error, Outbox& outbox) {
  for (const auto& [rank, push] : arrivals_) {
    state_.shared.sequencer.finish(push.ticket, error, outbox);
  }
  state_.release(arrivals_);
  arrivals_.clear();
}

std::vector<uint32_t> ParamSet::oldest_readers() const {
  std::vector<uint32_t> ranks;
  uint64_t oldest = wire::kAnyStaleness;
  for (const auto& [rank, read] : readers_) {
    if (arrivals_.contains(rank) || read > oldest) continue;
    if (read < oldest) ranks.clear();
    oldest = read;
    ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace cpudist::server
