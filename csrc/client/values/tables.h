// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Tables as wholes: what servers count of them, and rows that are to go.
#pragma once

#include <cstdint>

#include "client/shared.h"
#include "client/state.h"
#include "wire/control.h"

namespace cpudist::client {

// The sum over all servers.
wire::TableCounts table_counts(Shared& shared, const SetState& set, uint32_t table);
// Has every server free the rows of a table that its spec wants to go now. Returns how many that
// were. The caller has called Shared::sequence().
uint64_t shrink(Shared& shared, const SetState& set, uint32_t table);

}  // namespace cpudist::client
