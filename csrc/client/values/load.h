// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of snapshots, which servers read themselves: what trainer 0 tells them.
#pragma once

#include <cstdint>

#include "client/shared.h"
#include "client/state.h"
#include "wire/snapshot/load.h"

namespace cpudist::client {

// Returns when the server has loaded it. The caller has called Shared::sequence(). Throws what the
// server answers: kSnapshot, kSnapshotCorrupt, kInvalidArgument.
void load(Shared& shared, const SetState& set, uint32_t server, const wire::Load& what);

}  // namespace cpudist::client
