// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The kernels compiled for AVX-512 (F, DQ, BW, VL). Its flags (cmake/sources.cmake) change no
// value: they let the compiler use vector square roots and selects.

#if defined(__x86_64__)

#include "kernels/levels/table.h"

// After the includes, so that nothing shared with other files is compiled for this target.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")
#endif

#define CPUDIST_LEVEL avx512_level
#include "kernels/levels/level_impl.h"

namespace cpudist::kernels {

const KernelTable& avx512_kernels() { return avx512_level::kTable; }

}  // namespace cpudist::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(__x86_64__)
