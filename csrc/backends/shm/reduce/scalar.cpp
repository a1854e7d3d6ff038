// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The reductions for any processor.
#include "backends/shm/reduce/table.h"

#define CPUDIST_LEVEL scalar_level
#include "backends/shm/reduce/impl.h"

namespace cpudist::shm {

const ReduceTable& scalar_reduce() { return scalar_level::kTable; }

}  // namespace cpudist::shm
