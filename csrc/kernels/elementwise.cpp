// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Choice of the kernel table, and the element loops of elementwise.h on top of it.

#include "kernels/elementwise.h"

#include "kernels/levels/table.h"

namespace cpudist::kernels {

const KernelTable& current_kernels() {
#if defined(__x86_64__)
  switch (simd_level()) {
    case SimdLevel::kAvx512:
      return avx512_kernels();
    case SimdLevel::kAvx2:
      return avx2_kernels();
    case SimdLevel::kScalar:
      break;
  }
#else
  static_cast<void>(simd_level());  // a CPUDIST_SIMD that cannot be honoured is still an error
#endif
  return scalar_kernels();
}

template <typename T>
double squared_norm(const T* values, size_t n) {
  return typed_kernels<T>().squared_norm(values, n);
}

template <typename T>
bool all_finite(const T* values, size_t n) {
  return typed_kernels<T>().all_finite(values, n);
}

template <typename T>
void add(T* target, const T* values, size_t n) {
  typed_kernels<T>().add(target, values, n);
}

template <typename T>
void accumulate(T* target, const T* values, T weight, size_t n) {
  typed_kernels<T>().accumulate(target, values, weight, n);
}

template <typename T>
void scale_into(T* target, const T* values, T scale, size_t n) {
  typed_kernels<T>().scale_into(target, values, scale, n);
}

template <typename T>
void clamp(T* values, T low, T high, size_t n) {
  typed_kernels<T>().clamp(values, low, high, n);
}

template <typename T>
void take_delta(T* weight, T* shadow, T divisor, T* negated, size_t n) {
  typed_kernels<T>().take_delta(weight, shadow, divisor, negated, n);
}

template <typename T>
void merge_fresh(T* weight, T* shadow, const T* fresh, size_t n) {
  typed_kernels<T>().merge_fresh(weight, shadow, fresh, n);
}

template <typename T>
void compensate(T* out, const T* gradient, const T* weight, const T* read, T factor, size_t n) {
  typed_kernels<T>().compensate(out, gradient, weight, read, factor, n);
}

template <typename T>
void compensate_adaptive(T* out, const T* gradient, const T* weight, const T* read, T* means,
                         const AdaptiveScalars<T>& scalars, size_t n) {
  typed_kernels<T>().compensate_adaptive(out, gradient, weight, read, means, scalars, n);
}

template double squared_norm(const float*, size_t);
template double squared_norm(const double*, size_t);
template bool all_finite(const float*, size_t);
template bool all_finite(const double*, size_t);
template void add(float*, const float*, size_t);
template void add(double*, const double*, size_t);
template void accumulate(float*, const float*, float, size_t);
template void accumulate(double*, const double*, double, size_t);
template void scale_into(float*, const float*, float, size_t);
template void scale_into(double*, const double*, double, size_t);
template void clamp(float*, float, float, size_t);
template void clamp(double*, double, double, size_t);
template void take_delta(float*, float*, float, float*, size_t);
template void take_delta(double*, double*, double, double*, size_t);
template void merge_fresh(float*, float*, const float*, size_t);
template void merge_fresh(double*, double*, const double*, size_t);
template void compensate(float*, const float*, const float*, const float*, float, size_t);
template void compensate(double*, const double*, const double*, const double*, double, size_t);
template void compensate_adaptive(float*, const float*, const float*, const float*, float*,
                                  const AdaptiveScalars<float>&, size_t);
template void compensate_adaptive(double*, const double*, const double*, const double*, double*,
                                  const AdaptiveScalars<double>&, size_t);

}  // namespace cpudist::kernels
