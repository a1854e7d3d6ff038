// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Taking part in rounds: all servers name the same one as the first.
#pragma once

#include <memory>

#include "client/membership.h"

namespace cpudist::client {

class RoundMembership final : public Membership {
 public:
  bool counts_rounds() const override { return true; }
  std::shared_ptr<Operation> make_join(Shared& shared,
                                       const std::shared_ptr<SetState>& set) const override;
};

}  // namespace cpudist::client
