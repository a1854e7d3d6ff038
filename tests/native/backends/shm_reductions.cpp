// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// The arithmetic of the collectives through shared memory: vector levels that agree, roundings.

#include <cstdint>
#include <limits>
#include <vector>

#include "backends/shm/reduce/reduce.h"
#include "backends/shm/reduce/table.h"
#include "base/errors.h"
#include "support/check.h"

namespace cpudist::shm {
namespace {

using cpudist::testing::kInstrumented;

// Whether two results are the same bits, or both NaN: which of two NaN a sum keeps is not defined.
template <typename T>
bool same(const void* a, const void* b, size_t count, T infinity) {
  const T *first = static_cast<const T*>(a), *second = static_cast<const T*>(b);
  const T sign = static_cast<T>(T{1} << (sizeof(T) * 8 - 1));
  for (size_t i = 0; i < count; ++i) {
    const bool nan = (first[i] & ~sign) > infinity && (second[i] & ~sign) > infinity;
    if (first[i] != second[i] && !nan) return false;
  }
  return true;
}

bool same(DType dtype, const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  const size_t count = a.size() * sizeof(uint64_t) / size_of(dtype);
  switch (dtype) {
    case DType::kF32:
      return same<uint32_t>(a.data(), b.data(), count, 0x7f800000U);
    case DType::kF64:
      return same<uint64_t>(a.data(), b.data(), count, 0x7ff0000000000000ULL);
    case DType::kBf16:
      return same<uint16_t>(a.data(), b.data(), count, 0x7f80);
    case DType::kF16:
      return same<uint16_t>(a.data(), b.data(), count, 0x7c00);
    default:
      return a == b;
  }
}

}  // namespace

TEST(shm_reductions_of_all_levels_are_equal) {
  const ReduceTable* tables[] = {
      &scalar_reduce(),
#if defined(__x86_64__)
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &avx2_reduce()
                                                                       : &scalar_reduce(),
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512dq")
          ? &avx512_reduce()
          : &scalar_reduce()
#endif
  };
  const size_t count = 65'536 + 13;
  std::vector<uint64_t> bits[3];
  uint64_t state = 1;
  for (auto& one : bits) {
    for (size_t i = 0; i < count; ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      // The second half has all patterns of 16 bits in a row.
      one.push_back(i < count / 2 ? state : i * 0x0001'0001'0001'0001ULL);
    }
  }
  const void* sources[] = {bits[0].data(), bits[1].data(), bits[2].data()};
  for (int type = 0; type < kArithmeticTypes; ++type) {
    for (int op = 0; op < kArithmetic; ++op) {
      for (int n = kInstrumented ? 3 : 1; n <= 3; ++n) {
        for (const int divisor : {1, 3, 4}) {
          std::vector<uint64_t> found[3];
          for (size_t level = 0; level < std::size(tables); ++level) {
            found[level].resize(count);
            const size_t elements = count * sizeof(uint64_t) / size_of(static_cast<DType>(type));
            tables[level]->arithmetic[type][op](found[level].data(), sources, n, elements, divisor);
            CHECK(same(static_cast<DType>(type), found[level], found[0]));
          }
        }
      }
    }
  }
}

// The average that integers without bounds would have.
template <typename T>
void check_average(DType dtype, int ranks) {
  using Limits = std::numeric_limits<T>;
  const T lowest = Limits::min(), most = Limits::max(), odd = static_cast<T>(-1);
  const auto less = static_cast<T>(most - 1);
  const std::vector<T> first{most, lowest, odd, most, 100}, others{most, lowest, 0, less, 101};
  std::vector<const void*> sources(static_cast<size_t>(ranks), others.data());
  sources[0] = first.data();
  std::vector<T> found(first.size());
  reduce(dtype, Reduction::kSum, found.data(), sources.data(), ranks, found.size(), ranks);
  // (max + (n - 1) (max - 1)) / n is max - 1 + 1 / n; (100 + (n - 1) 101) / n is 101 - 1 / n.
  const auto third = static_cast<T>(odd / ranks);
  const std::vector<T> expected{most, lowest, third, less, 100};
  CHECK(found == expected);
}

TEST(shm_averages_of_integers_are_exact) {
  // 300 ranks are more than the small types can count.
  for (const int ranks : {2, 3, 4, 300}) {
    check_average<int8_t>(DType::kI8, ranks);
    check_average<uint8_t>(DType::kU8, ranks);
    check_average<int16_t>(DType::kI16, ranks);
    check_average<int32_t>(DType::kI32, ranks);
    check_average<int64_t>(DType::kI64, ranks);
  }
}

TEST(shm_half_precision_rounds_to_even) {
  const uint16_t one_f16 = 0x3c00, tiny_f16 = 0x1000, one_bf16 = 0x3f80, half_ulp_bf16 = 0x3b80;
  uint16_t out = 0;
  const void* halves[] = {&one_f16, &tiny_f16};
  reduce(DType::kF16, Reduction::kSum, &out, halves, 2, 1, 1);
  CHECK_EQ(out, one_f16);
  const void* brains[] = {&one_bf16, &half_ulp_bf16};
  reduce(DType::kBf16, Reduction::kSum, &out, brains, 2, 1, 1);
  CHECK_EQ(out, one_bf16);
  const uint16_t nan = 0x7fc0;
  const void* nans[] = {&one_bf16, &nan};
  reduce(DType::kBf16, Reduction::kMin, &out, nans, 2, 1, 1);
  CHECK_EQ(out, nan);
  CHECK_THROWS(reduce(DType::kF32, Reduction::kXor, &out, nans, 2, 1, 1), Error);
}

}  // namespace cpudist::shm
