// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Element loops over flat buffers: averaging of a round, clipping, norms, deltas. Reductions use a
// fixed tree of 16 lanes, so the result depends on the values and their number only.

#pragma once

#include <cstddef>

namespace cpudist::kernels {

// Lane j sums the squares of elements j, j + 16, ... in double; lanes are then added pairwise.
template <typename T>
double squared_norm(const T* values, size_t n);

// Whether no value is infinite or NaN.
template <typename T>
bool all_finite(const T* values, size_t n);

// target[i] += values[i]
template <typename T>
void add(T* target, const T* values, size_t n);

// target[i] += weight * values[i], product and sum rounded one after the other
template <typename T>
void accumulate(T* target, const T* values, T weight, size_t n);

// target[i] = scale * values[i]; target may be values
template <typename T>
void scale_into(T* target, const T* values, T scale, size_t n);

// values[i] = min(max(values[i], low), high); NaN stays NaN
template <typename T>
void clamp(T* values, T low, T high, size_t n);

// A trainer's share of its movement since `shadow`: delta = (weight - shadow) / divisor, shadow +=
// delta, negated = -delta. With divisor 1 then weight = shadow, without what rounding keeps back.
// Ranges must not overlap.
template <typename T>
void take_delta(T* weight, T* shadow, T divisor, T* negated, size_t n);

// What others have moved: weight += fresh - shadow where they differ (weight = fresh where it was
// shadow), then shadow = fresh.
template <typename T>
void merge_fresh(T* weight, T* shadow, const T* fresh, size_t n);

// Delay compensation: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay
// Compensation", ICML 2017, of a gradient that was computed on `read` while the weight has moved
// on. out[i] = g + ((factor * g) * g) * (weight - read); exactly g where nothing has moved,
// whatever g is, and where the product is zero. out may be gradient.
template <typename T>
void compensate(T* out, const T* gradient, const T* weight, const T* read, T factor, size_t n);

template <typename T>
struct AdaptiveScalars {
  T factor;
  T momentum;
  T one_minus_momentum;
  T epsilon;
};

// The same with factor / sqrt(mean + epsilon) for the factor of element i, where first
// mean = momentum * mean + one_minus_momentum * (g * g).
template <typename T>
void compensate_adaptive(T* out, const T* gradient, const T* weight, const T* read, T* means,
                         const AdaptiveScalars<T>& scalars, size_t n);

}  // namespace cpudist::kernels
