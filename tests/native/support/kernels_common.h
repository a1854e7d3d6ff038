// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the kernel tests share: sizes around every vector width, reproducible values, and the runner
// that compares each vector level of this processor with the scalar one bit by bit.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/levels/simd.h"
#include "support/check.h"

namespace cpudist::testing {

inline std::vector<size_t> kernel_sizes() {
  std::vector<size_t> sizes;
  for (size_t n = 0; n <= 70; ++n) sizes.push_back(n);
  sizes.push_back(429);
  sizes.push_back(4099);
  return sizes;
}

inline std::vector<kernels::SimdLevel> supported_levels() {
  std::vector<kernels::SimdLevel> levels;
  for (kernels::SimdLevel level :
       {kernels::SimdLevel::kScalar, kernels::SimdLevel::kAvx2, kernels::SimdLevel::kAvx512}) {
    if (level <= kernels::detected_simd_level()) levels.push_back(level);
  }
  return levels;
}

// Values of mixed magnitude, so that a different order of additions shows.
template <typename T>
std::vector<T> random_values(size_t n, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0.0, 1.0);
  std::uniform_int_distribution<int> exponent(-12, 4);
  std::vector<T> values(n);
  for (T& value : values) {
    value = static_cast<T>(std::ldexp(normal(engine), exponent(engine)));
  }
  return values;
}

inline std::vector<int64_t> random_keys(size_t n, int64_t limit, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::uniform_int_distribution<int64_t> pick(0, limit - 1);
  std::vector<int64_t> keys(n);
  for (int64_t& key : keys) key = pick(engine);
  return keys;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// compute() returns the outputs of a kernel as one vector; it must be a pure function.
template <typename Compute>
void check_levels_agree(const std::string& what, Compute compute) {
  const auto scalar = [&] {
    const kernels::ScopedSimdLevel pin(kernels::SimdLevel::kScalar);
    return compute();
  }();
  for (kernels::SimdLevel level : supported_levels()) {
    const kernels::ScopedSimdLevel pin(level);
    if (!same_bits(compute(), scalar)) {
      fail(__FILE__, __LINE__,
           what + ": " + kernels::simd_level_name(level) + " differs from scalar");
    }
  }
}

}  // namespace cpudist::testing
