// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The reductions compiled for AVX512. Its flags (cmake/sources.cmake) change no value: they let the
// compiler use vector selects.

#if defined(__x86_64__)

#include <immintrin.h>

#include "backends/shm/reduce/table.h"

// The standard headers first, so that nothing shared with other files is compiled for this target.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(                                                                   \
    __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,f16c,prefer-vector-width=512"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,f16c,prefer-vector-width=512")
#endif

#define CPUDIST_F16C
#define CPUDIST_LEVEL avx512_level
#include "backends/shm/reduce/impl.h"

namespace cpudist::shm {

const ReduceTable& avx512_reduce() { return avx512_level::kTable; }

}  // namespace cpudist::shm

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(__x86_64__)
