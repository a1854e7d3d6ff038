// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The kernels compiled for the baseline instruction set, whatever the processor. Its flags
// (cmake/sources.cmake) change no value: they let the compiler use vector square roots and selects.

#include "kernels/levels/table.h"

#define CPUDIST_LEVEL scalar_level
#include "kernels/levels/level_impl.h"

namespace cpudist::kernels {

const KernelTable& scalar_kernels() { return scalar_level::kTable; }

}  // namespace cpudist::kernels
