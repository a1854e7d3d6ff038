// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Detection and selection of the vector level.

#include "kernels/levels/simd.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace cpudist::kernels {
namespace {

constexpr int kNoOverride = -1;
thread_local int override_level = kNoOverride;

SimdLevel detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return SimdLevel::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return SimdLevel::kAvx2;
#endif
  return SimdLevel::kScalar;
}

void require_supported(SimdLevel level, const char* source) {
  if (level > detected_simd_level()) {
    throw std::invalid_argument(std::string(source) + ": this processor supports up to " +
                                simd_level_name(detected_simd_level()) + ", found " +
                                simd_level_name(level) + "; choose a lower level");
  }
}

SimdLevel level_from_environment() {
  const char* value = std::getenv("CPUDIST_SIMD");
  if (value == nullptr || *value == '\0') return detected_simd_level();
  const std::string name = value;
  for (SimdLevel level : {SimdLevel::kScalar, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    if (name == simd_level_name(level)) {
      require_supported(level, "CPUDIST_SIMD");
      return level;
    }
  }
  throw std::invalid_argument("CPUDIST_SIMD: expected scalar, avx2 or avx512, found '" + name +
                              "'; unset it to use the best level of this processor");
}

}  // namespace

SimdLevel detected_simd_level() {
  static const SimdLevel level = detect();
  return level;
}

SimdLevel simd_level() {
  if (override_level != kNoOverride) return static_cast<SimdLevel>(override_level);
  static const SimdLevel level = level_from_environment();
  return level;
}

const char* simd_level_name(SimdLevel level) {
  switch (level) {
    case SimdLevel::kScalar:
      return "scalar";
    case SimdLevel::kAvx2:
      return "avx2";
    case SimdLevel::kAvx512:
      return "avx512";
  }
  return "unknown";
}

ScopedSimdLevel::ScopedSimdLevel(SimdLevel level) : previous_(override_level) {
  require_supported(level, "ScopedSimdLevel");
  override_level = static_cast<int>(level);
}

ScopedSimdLevel::~ScopedSimdLevel() { override_level = previous_; }

}  // namespace cpudist::kernels
