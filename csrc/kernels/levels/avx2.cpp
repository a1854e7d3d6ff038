// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The kernels compiled for AVX2. Its flags (cmake/sources.cmake) change no value: they let the
// compiler use vector square roots and selects.

#if defined(__x86_64__)

#include "kernels/levels/table.h"

// After the includes, so that nothing shared with other files is compiled for this target.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#define CPUDIST_LEVEL avx2_level
#include "kernels/levels/level_impl.h"

namespace cpudist::kernels {

const KernelTable& avx2_kernels() { return avx2_level::kTable; }

}  // namespace cpudist::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(__x86_64__)
