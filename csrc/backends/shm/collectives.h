// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The collectives, each in pieces that fit the ranks' buffers. At its first event every rank waits
// for all others and compares what they call, so that a mismatch is told on every rank.
#pragma once

#include "backends/shm/buffers.h"
#include "backends/shm/channel.h"
#include "backends/shm/task.h"
#include "backends/shm/types.h"

namespace cpudist::shm {

// Makes the collective that `call` asks for; `channel`, `buffers` and `call` outlive it.
// Throws Error(kInvalidArgument) for a reduction the dtype does not have.
Task make_task(Channel& channel, const Buffers& buffers, const Call& call);

}  // namespace cpudist::shm
