// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Updates on arrival: a push is applied as it comes, unless that would make the gradient that
// another trainer is computing older than max_staleness updates.

#include <algorithm>
#include <utility>

#include "core/param_set.h"

namespace cpudist::core {

void ParamSet::add_reader(uint32_t rank) {
  if (!on_arrival() || !bounded()) return;
  // Nobody's gradient may be held for ever: as many readers as the bound has room for.
  if (!readers_.contains(rank) && readers_.size() > layout_.max_staleness) {
    throw Error(ErrorCode::kConfigMismatch,
                "parameter set " + std::to_string(id_) +
                    " has max_staleness = " + std::to_string(layout_.max_staleness) + ", which " +
                    std::to_string(readers_.size()) + " trainers use up; trainer " +
                    std::to_string(rank) + " needs a larger one");
  }
  readers_[rank] = round_;
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
    // round_ + 1 + k <= read + max_staleness, without an overflow.
    const uint64_t age = round_ + 1 + k - earlier[k];
    if (age > layout_.max_staleness) return false;
  }
  return true;
}

void ParamSet::apply_arrivals(Outbox& outbox) {
  while (!broken_) {
    const auto due = [this](uint32_t rank) {
      const auto reader = readers_.find(rank);
      return reader == readers_.end() ? 0 : reader->second;
    };
    auto next = pushes_.end();
    for (auto entry = pushes_.begin(); entry != pushes_.end(); ++entry) {
      if (!may_apply(entry->first)) continue;
      if (next == pushes_.end() || due(entry->first) < due(next->first)) next = entry;
    }
    if (next == pushes_.end()) return;
    apply_arrival(next->first, outbox);
  }
}

void ParamSet::apply_arrival(uint32_t rank, Outbox& outbox) {
  RoundPushes one;
  one.insert(pushes_.extract(rank));
  const RoundPush& push = one.begin()->second;
  shared_.counters.pending_bytes.fetch_sub(push.payload.size());
  try {
    update_.apply(one, round_);
    ++round_;
    samples_ += push.view.header.samples;
    shared_.counters.rounds.fetch_add(1);
    if (readers_.contains(rank)) readers_[rank] = round_;
    if (layout_.exchanges_deltas) {
      note_changes(rank, push);
      shared_.peers.finish(push.ticket, FrameKind::kReply, changes_reply(rank), outbox);
      return;
    }
    std::vector<uint32_t> blocks;
    for (const auto& block : store_.blocks) {
      if (block != nullptr && push.view.header.want_dense) blocks.push_back(block->id());
    }
    shared_.peers.finish(push.ticket, FrameKind::kReply, dense_reply(blocks), outbox);
  } catch (const std::exception& error) {
    break_set(error, outbox);
    shared_.peers.finish(push.ticket, *broken_, outbox);
  }
}

std::vector<uint32_t> ParamSet::oldest_readers() const {
  std::vector<uint32_t> ranks;
  uint64_t oldest = kAnyStaleness;
  for (const auto& [rank, read] : readers_) {
    if (pushes_.contains(rank) || read > oldest) continue;
    if (read < oldest) ranks.clear();
    oldest = read;
    ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace cpudist::core
