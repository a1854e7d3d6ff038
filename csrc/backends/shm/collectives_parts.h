// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The collectives one by one, for make_task. Internal to csrc/backends/shm.
#pragma once

#include "backends/shm/collectives.h"

namespace cpudist::shm {

Task all_reduce(Channel& channel, const Buffers& buffers, const Call& call);
Task reduce_to_root(Channel& channel, const Call& call);
Task reduce_scatter(Channel& channel, const Call& call);

}  // namespace cpudist::shm
