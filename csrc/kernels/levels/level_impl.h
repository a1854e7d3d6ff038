// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The loops of every kernel, included once per vector level by kernels_<level>.cpp, which
// defines CPUDIST_LEVEL (a namespace and the prefix of the table's name) and may have set a target
// with a pragma. Everything is in a namespace of the level or internal to it: an inline
// function shared between levels could be linked in with instructions the processor lacks.

#define CPUDIST_INLINE inline __attribute__((always_inline))

namespace cpudist::kernels {
namespace CPUDIST_LEVEL {
namespace {

constexpr size_t kLanes = 16;
// Rows ahead: far enough to hide a miss, near enough not to be evicted again.
constexpr size_t kPrefetchRows = 8;
constexpr size_t kLineBytes = 64;
constexpr size_t kQuantileRun = 128;

CPUDIST_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
CPUDIST_INLINE double square_root(double x) { return __builtin_sqrt(x); }
CPUDIST_INLINE float power(float x, float y) { return __builtin_powf(x, y); }
CPUDIST_INLINE double power(double x, double y) { return __builtin_pow(x, y); }

template <typename T>
CPUDIST_INLINE T fold_lanes(const T* lanes) {
  T folded[kLanes];
  for (size_t j = 0; j < kLanes; ++j) folded[j] = lanes[j];
  for (size_t width = kLanes / 2; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) folded[j] = folded[j] + folded[j + width];
  }
  return folded[0];
}

#include "kernels/levels/initial_impl.h"
#include "kernels/levels/quantize_impl.h"
#include "kernels/levels/update_impl.h"

template <typename T>
CPUDIST_INLINE void prefetch_row(const T* row, size_t dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < dim * sizeof(T); at += kLineBytes) __builtin_prefetch(bytes + at, 1);
}

template <OptimizerKind kKind, typename T>
CPUDIST_INLINE void update_run(const StepScalars<T>& s, T* w, T* state, const T* g, size_t n) {
  if constexpr (kKind == OptimizerKind::kSgd) {
    update_sgd(s, w, state, g, n);
  } else if constexpr (kKind == OptimizerKind::kAdagrad) {
    update_adagrad(s, w, state, g, n);
  } else if constexpr (kKind == OptimizerKind::kRowWiseAdagrad) {
    update_row_wise(s, w, state, g, n);
  } else if constexpr (kKind == OptimizerKind::kAdam) {
    update_adam<false>(s, w, state, g, n);
  } else if constexpr (kKind == OptimizerKind::kSparseAdam) {
    update_sparse_adam(s, w, state, g, n);
  } else if constexpr (kKind == OptimizerKind::kAdamW) {
    update_adam<true>(s, w, state, g, n);
  } else if constexpr (kKind == OptimizerKind::kRmsprop) {
    update_rmsprop(s, w, state, g, n);
  } else {
    update_ftrl(s, w, state, g, n);
  }
}

template <OptimizerKind kKind, typename T>
void update_flat(const StepScalars<T>& s, T* w, T* state, const T* g, size_t n) {
  update_run<kKind>(s, w, state, g, n);
}

template <OptimizerKind kKind, typename T>
void update_scattered(const StepScalars<T>& s, T* const* weights, T* const* states,
                      const T* const* grads, size_t rows, size_t dim) {
  for (size_t i = 0; i < rows; ++i) {
    if (i + kPrefetchRows < rows) {
      prefetch_row(weights[i + kPrefetchRows], dim);
      if (states != nullptr) prefetch_row(states[i + kPrefetchRows], dim);
    }
    update_run<kKind>(s, weights[i], states == nullptr ? nullptr : states[i], grads[i], dim);
  }
}

template <typename T>
double squared_norm(const T* __restrict values, size_t n) {
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) {
      const double value = static_cast<double>(values[i + j]);
      lanes[j] = lanes[j] + value * value;
    }
  }
  for (size_t j = 0; i + j < n; ++j) {
    const double value = static_cast<double>(values[i + j]);
    lanes[j] = lanes[j] + value * value;
  }
  return fold_lanes(lanes);
}

template <typename T>
struct MaskOf {  // a whole number of its size
  using Type = int32_t;
};
template <>
struct MaskOf<double> {
  using Type = int64_t;
};

// x - x is 0, and NaN where x is infinite or NaN. No early end: that would keep the loop scalar.
template <typename T>
bool all_finite(const T* __restrict values, size_t n) {
  using Mask = typename MaskOf<T>::Type;
  Mask other = 0;
  for (size_t i = 0; i < n; ++i) {
    const T zero = values[i] - values[i];
    other |= zero == T{0} ? Mask{0} : Mask{1};
  }
  return other == 0;
}

template <typename T>
CPUDIST_INLINE void add_run(T* __restrict target, const T* __restrict values, size_t n) {
  for (size_t i = 0; i < n; ++i) target[i] = target[i] + values[i];
}

template <typename T>
void add(T* target, const T* values, size_t n) {
  add_run(target, values, n);
}

template <typename T>
void accumulate(T* __restrict target, const T* __restrict values, T weight, size_t n) {
  for (size_t i = 0; i < n; ++i) target[i] = target[i] + weight * values[i];
}

// No __restrict: target may be values.
template <typename T>
void scale_into(T* target, const T* values, T scale, size_t n) {
  for (size_t i = 0; i < n; ++i) target[i] = scale * values[i];
}

template <typename T>
void clamp(T* __restrict values, T low, T high, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const T value = values[i];
    const T raised = value < low ? low : value;
    values[i] = raised > high ? high : raised;
  }
}

template <typename T>
void take_delta(T* __restrict weight, T* __restrict shadow, T divisor, T* __restrict negated,
                size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const T delta = (weight[i] - shadow[i]) / divisor;
    // The servers round the same sum.
    shadow[i] = shadow[i] + delta;
    // All of it is handed on: what rounding keeps back must not count as movement later.
    weight[i] = divisor == T(1) ? shadow[i] : weight[i];
    negated[i] = -delta;
  }
}

template <typename T>
void merge_fresh(T* __restrict weight, T* __restrict shadow, const T* __restrict fresh, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    // Without movement of its own a weight becomes the server's to the bit.
    const T own = weight[i] == shadow[i] ? fresh[i] : weight[i] + (fresh[i] - shadow[i]);
    weight[i] = fresh[i] == shadow[i] ? weight[i] : own;
    shadow[i] = fresh[i];
  }
}

template <typename T>
CPUDIST_INLINE T compensated(T g, T moved, T factor) {
  const T term = factor * g * g * moved;
  // Not a sum with zero: an infinite square times zero is no number, and -0 + 0 is not -0.
  return moved == T(0) || term == T(0) ? g : g + term;
}

// No __restrict here and below: out may be g.
template <typename T>
void compensate(T* out, const T* g, const T* w, const T* read, T factor, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = compensated(g[i], w[i] - read[i], factor);
}

template <typename T>
void compensate_adaptive(T* out, const T* g, const T* w, const T* read, T* means,
                         const AdaptiveScalars<T>& s, size_t n) {
  const T factor = s.factor;
  const T momentum = s.momentum;
  const T one_minus_momentum = s.one_minus_momentum;
  const T epsilon = s.epsilon;
  for (size_t i = 0; i < n; ++i) {
    const T grad = g[i];
    const T mean = momentum * means[i] + one_minus_momentum * (grad * grad);
    means[i] = mean;
    out[i] = compensated(grad, w[i] - read[i], factor / square_root(mean + epsilon));
  }
}

template <typename T>
CPUDIST_INLINE void copy_run(T* __restrict target, const T* __restrict values, size_t n) {
  for (size_t i = 0; i < n; ++i) target[i] = values[i];
}

// A segment is new exactly when its number is the count of those seen so far, because
// numbers are given in the order of first occurrence. kFixedDim = 0 takes dim.
template <size_t kFixedDim, typename T, typename Destination>
CPUDIST_INLINE void sum_rows_of(const T* rows, size_t row_stride, size_t n, size_t any_dim,
                                const uint32_t* inverse, Destination destination) {
  const size_t dim = kFixedDim == 0 ? any_dim : kFixedDim;
  uint32_t seen = 0;
  for (size_t i = 0; i < n; ++i) {
    if (i + kPrefetchRows < n) prefetch_row(destination(inverse[i + kPrefetchRows]), dim);
    T* target = destination(inverse[i]);
    const T* row = rows + i * row_stride;
    if (inverse[i] == seen) {
      copy_run(target, row, dim);
      ++seen;
    } else {
      add_run(target, row, dim);
    }
  }
}

// Common row lengths get loops of fixed length.
template <typename T, typename Destination>
CPUDIST_INLINE void sum_in_order(const T* rows, size_t row_stride, size_t n, size_t dim,
                                 const uint32_t* inverse, Destination destination) {
  switch (dim) {
    case 8:
      return sum_rows_of<8>(rows, row_stride, n, dim, inverse, destination);
    case 16:
      return sum_rows_of<16>(rows, row_stride, n, dim, inverse, destination);
    case 32:
      return sum_rows_of<32>(rows, row_stride, n, dim, inverse, destination);
    case 64:
      return sum_rows_of<64>(rows, row_stride, n, dim, inverse, destination);
    default:
      return sum_rows_of<0>(rows, row_stride, n, dim, inverse, destination);
  }
}

template <typename T>
void segment_sum(const T* rows, size_t row_stride, size_t n, size_t dim, const uint32_t* inverse,
                 T* out) {
  sum_in_order(rows, row_stride, n, dim, inverse, [=](uint32_t u) { return out + u * dim; });
}

template <typename T>
void segment_sum_to(const T* rows, size_t row_stride, size_t n, size_t dim, const uint32_t* inverse,
                    T* const* destinations) {
  sum_in_order(rows, row_stride, n, dim, inverse, [=](uint32_t u) { return destinations[u]; });
}

template <typename T>
void segment_sum_any(const T* rows, size_t row_stride, size_t n, size_t dim, const int64_t* inverse,
                     T* out) {
  for (size_t i = 0; i < n; ++i) {
    if (i + kPrefetchRows < n) {
      prefetch_row(out + static_cast<size_t>(inverse[i + kPrefetchRows]) * dim, dim);
    }
    add_run(out + static_cast<size_t>(inverse[i]) * dim, rows + i * row_stride, dim);
  }
}

template <typename T>
constexpr TypedKernels<T> typed_table() {
  using K = OptimizerKind;
  return {
      &squared_norm<T>,
      &all_finite<T>,
      &add<T>,
      &accumulate<T>,
      &scale_into<T>,
      &clamp<T>,
      &take_delta<T>,
      &merge_fresh<T>,
      &compensate<T>,
      &compensate_adaptive<T>,
      &segment_sum<T>,
      &segment_sum_to<T>,
      &segment_sum_any<T>,
      {&update_flat<K::kSgd, T>, &update_flat<K::kAdagrad, T>, &update_flat<K::kRowWiseAdagrad, T>,
       &update_flat<K::kAdam, T>, &update_flat<K::kSparseAdam, T>, &update_flat<K::kAdamW, T>,
       &update_flat<K::kRmsprop, T>, &update_flat<K::kFtrl, T>},
      {&update_scattered<K::kSgd, T>, &update_scattered<K::kAdagrad, T>,
       &update_scattered<K::kRowWiseAdagrad, T>, &update_scattered<K::kAdam, T>,
       &update_scattered<K::kSparseAdam, T>, &update_scattered<K::kAdamW, T>,
       &update_scattered<K::kRmsprop, T>, &update_scattered<K::kFtrl, T>}};
}

constexpr QuantizeKernels kQuantize = {&to_bfloat16, &from_bfloat16, &to_half,   &from_half,
                                       &to_int8,     &from_int8,     &residue_of};

constexpr InitialKernels kInitial = {&draw, &normal_quantiles};

constexpr KernelTable kTable = {typed_table<float>(), typed_table<double>(), kQuantize, kInitial};

}  // namespace
}  // namespace CPUDIST_LEVEL
}  // namespace cpudist::kernels
