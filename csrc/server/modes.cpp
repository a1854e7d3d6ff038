// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/modes.h"

#include "server/arrivals/arrivals.h"
#include "server/geo/change_log.h"
#include "server/replies.h"
#include "server/rounds/rounds.h"

namespace cpudist::server {
namespace {

std::unique_ptr<UpdatePolicy> make_policy(ParamState& state, const std::set<uint32_t>& members) {
  if (state.layout.mode == wire::UpdateMode::kRounds) {
    return std::make_unique<Rounds>(state, members);
  }
  return std::make_unique<Arrivals>(state);
}

std::unique_ptr<Replies> make_replies(const ParamState& state, const std::set<uint32_t>& members) {
  if (state.layout.exchanges_deltas) return std::make_unique<ChangeLog>(state, members);
  return std::make_unique<ValueReplies>(state);
}

}  // namespace

const Modes& all_modes() {
  static constexpr Modes kModes{&make_policy, &make_replies};
  return kModes;
}

}  // namespace cpudist::server
