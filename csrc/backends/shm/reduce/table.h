// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The loops of `reduce`, compiled once per vector level. Internal to csrc/backends/shm.
#pragma once

#include <cstddef>

#include "backends/shm/types.h"

namespace cpudist::shm {

using ReduceLoop = void (*)(void* out, const void* const* sources, int n, size_t count,
                            int divisor);

constexpr int kArithmeticTypes = 9;  // all of DType but kBytes
constexpr int kArithmetic = 4;       // kSum, kProduct, kMin, kMax
constexpr int kBitwise = 3;          // kAnd, kOr, kXor, on bytes

struct ReduceTable {
  ReduceLoop arithmetic[kArithmeticTypes][kArithmetic];
  ReduceLoop bitwise[kBitwise];
};

const ReduceTable& scalar_reduce();
#if defined(__x86_64__)
const ReduceTable& avx2_reduce();
const ReduceTable& avx512_reduce();
#endif

}  // namespace cpudist::shm
