// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The loops that are compiled once per vector level, as a table of function pointers. Internal to
// csrc/kernels: other code calls the functions of the public headers.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/elementwise.h"
#include "kernels/levels/simd.h"
#include "kernels/optimizers.h"

namespace cpudist::kernels {

template <typename T>
struct TypedKernels {
  using Update = void (*)(const StepScalars<T>&, T* weight, T* state, const T* grad, size_t n);
  using UpdateRows = void (*)(const StepScalars<T>&, T* const* weights, T* const* states,
                              const T* const* grads, size_t rows, size_t dim);

  double (*squared_norm)(const T* values, size_t n);
  bool (*all_finite)(const T* values, size_t n);
  void (*add)(T* target, const T* values, size_t n);
  void (*accumulate)(T* target, const T* values, T weight, size_t n);
  void (*scale_into)(T* target, const T* values, T scale, size_t n);
  void (*clamp)(T* values, T low, T high, size_t n);
  void (*take_delta)(T* weight, T* shadow, T divisor, T* negated, size_t n);
  void (*merge_fresh)(T* weight, T* shadow, const T* fresh, size_t n);
  void (*compensate)(T* out, const T* gradient, const T* weight, const T* read, T factor, size_t n);
  void (*compensate_adaptive)(T* out, const T* gradient, const T* weight, const T* read, T* means,
                              const AdaptiveScalars<T>& scalars, size_t n);
  void (*segment_sum)(const T* rows, size_t row_stride, size_t n, size_t dim,
                      const uint32_t* inverse, T* out);
  void (*segment_sum_to)(const T* rows, size_t row_stride, size_t n, size_t dim,
                         const uint32_t* inverse, T* const* destinations);
  void (*segment_sum_any)(const T* rows, size_t row_stride, size_t n, size_t dim,
                          const int64_t* inverse, T* out);
  Update update[kOptimizerKindCount];
  UpdateRows update_rows[kOptimizerKindCount];
};

struct QuantizeKernels {
  void (*to_bfloat16)(const float* values, uint16_t* out, size_t n);
  void (*from_bfloat16)(const uint16_t* values, float* out, size_t n);
  void (*to_half)(const float* values, uint16_t* out, size_t n);
  void (*from_half)(const uint16_t* values, float* out, size_t n);
  void (*to_int8)(const float* rows, size_t row_count, size_t dim, int8_t* out, uint16_t* scales);
  void (*from_int8)(const int8_t* values, const uint16_t* scales, size_t row_count, size_t dim,
                    float* out);
  void (*residue_of)(const float* meant, const float* sent, float* residue, size_t n);
};

struct InitialKernels {
  // Fractions in [0, 1) of 53 bits: elements first .. first + n - 1 of a row with this base.
  void (*draw)(uint64_t base, uint64_t first, double* out, size_t n);
  // values[i] becomes the quantile of the normal distribution at 0.5 + values[i].
  void (*normal_quantiles)(double* values, size_t n);
};

struct KernelTable {
  TypedKernels<float> f32;
  TypedKernels<double> f64;
  QuantizeKernels quantize;
  InitialKernels initial;
};

const KernelTable& scalar_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
#endif

// The table of the level in use by the calling thread.
const KernelTable& current_kernels();

template <typename T>
const TypedKernels<T>& typed_kernels();
template <>
inline const TypedKernels<float>& typed_kernels<float>() {
  return current_kernels().f32;
}
template <>
inline const TypedKernels<double>& typed_kernels<double>() {
  return current_kernels().f64;
}

}  // namespace cpudist::kernels
