// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Element-wise reduction of several ranks' elements, in the order of the ranks, so that the result
// is the same bits on every rank and in every run. bfloat16 and float16 are computed in float and
// rounded once. Integers wrap, but in averages, which are exact. NaN of any source is the result's.
#pragma once

#include <cstddef>

#include "backends/shm/types.h"

namespace cpudist::shm {

// out[i] = sources[0][i] op sources[1][i] op ..., divided by `divisor` (integers: towards zero;
// the sum that is divided does not wrap).
// `out` may be one of the sources; 1 <= n. kAnd, kOr and kXor: any integer dtype or kBytes.
// Throws Error(kInvalidArgument) for a dtype or an operation that do not go together.
void reduce(DType dtype, Reduction reduction, void* out, const void* const* sources, int n,
            size_t count, int divisor);

// Throws what `reduce` would.
void check_reducible(DType dtype, Reduction reduction, bool average);

}  // namespace cpudist::shm
