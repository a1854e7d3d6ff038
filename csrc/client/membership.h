// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Taking part in a parameter set's rounds; docs/architecture.md, Rounds.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "client/link.h"
#include "client/shared.h"
#include "client/state.h"

namespace cpudist::client {

// The operation that makes this trainer a member of the set. `set` lives as long as it.
std::shared_ptr<Operation> make_join(Shared& shared, const std::shared_ptr<SetState>& set);

// The round that every reply names; throws kProtocol if they differ. Servers that update on arrival
// need not agree: 0 then.
uint64_t agreed_round(const SetState& set, std::span<const RequestPtr> replies);

}  // namespace cpudist::client
