// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Taking part where each push is applied as it comes: nobody waits for who joins.
#pragma once

#include <memory>

#include "client/membership.h"

namespace cpudist::client {

class ArrivalMembership final : public Membership {
 public:
  bool counts_rounds() const override { return false; }
  std::shared_ptr<Operation> make_join(Shared& shared,
                                       const std::shared_ptr<SetState>& set) const override;
};

}  // namespace cpudist::client
