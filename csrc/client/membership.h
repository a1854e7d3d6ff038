// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Taking part in a parameter set; docs/mechanisms.md, "Rounds".
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "client/links/link.h"
#include "client/shared.h"
#include "client/state.h"

namespace cpudist::client {

// How a trainer takes part in the updates of a set. There is one for each mode of updates.
class Membership {
 public:
  virtual ~Membership() = default;
  // Whether all servers count the same rounds; else each counts the updates that came to it.
  virtual bool counts_rounds() const = 0;
  // The operation that makes this trainer a member of the set. It keeps `set`; this outlives it.
  virtual std::shared_ptr<Operation> make_join(Shared& shared,
                                               const std::shared_ptr<SetState>& set) const = 0;
};

// The round that every reply names; throws kProtocol if they differ. 0 where none is counted.
uint64_t agreed_round(const Membership& membership, std::span<const RequestPtr> replies);

}  // namespace cpudist::client
