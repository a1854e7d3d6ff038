// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Which vector instructions the kernels use. Every level computes the same IEEE operations in the
// same order, so the level changes the speed and never a bit of the result.

#pragma once

namespace cpudist::kernels {

enum class SimdLevel : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

// The best level this processor and operating system can run.
SimdLevel detected_simd_level();

// The level in use by the calling thread: its ScopedSimdLevel if one is alive, else
// CPUDIST_SIMD=scalar|avx2|avx512 (read once per process), else the detected one.
// Throws std::invalid_argument when CPUDIST_SIMD is unknown or not supported here.
SimdLevel simd_level();

const char* simd_level_name(SimdLevel level);

// Pins the calling thread to a level for the object's lifetime; for tests and benchmarks.
// Throws std::invalid_argument when this processor cannot run the level.
class ScopedSimdLevel {
 public:
  explicit ScopedSimdLevel(SimdLevel level);
  ~ScopedSimdLevel();
  ScopedSimdLevel(const ScopedSimdLevel&) = delete;
  ScopedSimdLevel& operator=(const ScopedSimdLevel&) = delete;

 private:
  int previous_;
};

}  // namespace cpudist::kernels
