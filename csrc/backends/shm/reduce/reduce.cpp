// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Checks a reduction and chooses the loop of this processor.
#include "backends/shm/reduce/reduce.h"

#include <cstring>
#include <string>

#include "backends/shm/reduce/table.h"
#include "base/errors.h"

namespace cpudist::shm {

namespace {

const ReduceTable& detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool f16c = __builtin_cpu_supports("f16c");
  if (f16c && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return avx512_reduce();
  }
  if (f16c && __builtin_cpu_supports("avx2")) return avx2_reduce();
#endif
  return scalar_reduce();
}

const ReduceTable& table() {
  static const ReduceTable& found = detect();
  return found;
}

bool bitwise(Reduction reduction) {
  return reduction == Reduction::kAnd || reduction == Reduction::kOr ||
         reduction == Reduction::kXor;
}

}  // namespace

void check_reducible(DType dtype, Reduction reduction, bool average) {
  const bool floating =
      dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kBf16 || dtype == DType::kF16;
  const bool fits = bitwise(reduction) ? !floating && !average
                                       : dtype != DType::kBytes && reduction != Reduction::kNone;
  if (fits) return;
  throw Error(ErrorCode::kInvalidArgument, std::string("backend shm: expected a reduction that ") +
                                               name_of(dtype) + " has, found " +
                                               (average ? "average" : name_of(reduction)) +
                                               "; bitwise ones take integers, the others numbers");
}

void reduce(DType dtype, Reduction reduction, void* out, const void* const* sources, int n,
            size_t count, int divisor) {
  check_reducible(dtype, reduction, divisor != 1);
  if (bitwise(reduction)) {
    const int index = static_cast<int>(reduction) - static_cast<int>(Reduction::kAnd);
    table().bitwise[index](out, sources, n, count * size_of(dtype), 1);
    return;
  }
  const int index = static_cast<int>(reduction) - static_cast<int>(Reduction::kSum);
  table().arithmetic[static_cast<int>(dtype)][index](out, sources, n, count, divisor);
}

}  // namespace cpudist::shm
