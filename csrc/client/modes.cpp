// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/modes.h"

#include "client/arrivals/join.h"
#include "client/rounds/join.h"

namespace cpudist::client {

const Membership& membership_of(const wire::ParamSetLayout& layout) {
  static const RoundMembership kRounds;
  static const ArrivalMembership kArrivals;
  if (layout.mode == wire::UpdateMode::kRounds) return kRounds;
  return kArrivals;
}

}  // namespace cpudist::client
