// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Taking part again in two sets that every trainer steps one after the other.
#pragma once

#include <memory>

#include "client/membership.h"
#include "client/shared.h"
#include "client/state.h"

namespace cpudist::client {

struct Joining {
  const Membership& membership;  // how the set is taken part in
  std::shared_ptr<SetState> set;
};

// Joins at one step of all others, which `last`, updated in rounds, counts: from it on both sets
// have this trainer's pushes, and cuts of `first` its markers. Joined by themselves the two could
// count it from different steps on, and each would wait for trainers that wait in the other one.
//
// Where `first` is updated in rounds, too, the round of `last` is held until all others, which have
// done that step of `first` by then, have pushed for it. Else the first push to `first` waits until
// all others have pushed to `last`: their markers of the step before are taken. Four or five
// requests in a row, of which one waits for a step of the others.
std::shared_ptr<Operation> make_join_with(Shared& shared, Joining first, Joining last);

}  // namespace cpudist::client
