// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Element loops, reductions and the choice of the vector level.

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "kernels/aligned.h"
#include "kernels/elementwise.h"
#include "support/kernels_common.h"

namespace cpudist::testing {
namespace {

using kernels::SimdLevel;

template <typename T>
void check_elementwise() {
  for (size_t n : kernel_sizes()) {
    const std::vector<T> values = random_values<T>(n, 1 + n);
    const std::vector<T> start = random_values<T>(n, 7000 + n);
    const T weight = static_cast<T>(0.3);
    const std::string at = " n=" + std::to_string(n);

    const auto accumulated = [&] {
      std::vector<T> target = start;
      kernels::accumulate(target.data(), values.data(), weight, n);
      return target;
    };
    check_levels_agree("accumulate" + at, accumulated);
    const std::vector<T> sums = accumulated();
    for (size_t i = 0; i < n; ++i) {
      const volatile T product = weight * values[i];  // rounded before the sum
      CHECK(sums[i] == start[i] + product);
    }
    check_levels_agree("add" + at, [&] {
      std::vector<T> target = start;
      kernels::add(target.data(), values.data(), n);
      for (size_t i = 0; i < n; ++i) CHECK(target[i] == start[i] + values[i]);
      return target;
    });
    check_levels_agree("scale_into" + at, [&] {
      std::vector<T> target = values;
      kernels::scale_into(target.data(), target.data(), weight, n);
      for (size_t i = 0; i < n; ++i) CHECK(target[i] == weight * values[i]);
      return target;
    });
    check_levels_agree("clamp" + at, [&] {
      std::vector<T> target = values;
      kernels::clamp(target.data(), static_cast<T>(-0.1), static_cast<T>(0.2), n);
      for (size_t i = 0; i < n; ++i) {
        CHECK(target[i] == std::min(std::max(values[i], static_cast<T>(-0.1)), T(0.2)));
      }
      return target;
    });
    check_levels_agree("squared_norm" + at, [&] {
      return std::vector<double>{kernels::squared_norm(values.data(), n)};
    });
    long double exact = 0;
    for (T value : values) exact += static_cast<long double>(value) * value;
    CHECK_NEAR(kernels::squared_norm(values.data(), n), exact, 1e-12 * exact + 1e-30);
  }
}

template <typename T>
void check_compensation() {
  const T factor = static_cast<T>(0.7);
  const kernels::AdaptiveScalars<T> scalars = {factor, T(0.9), T(1.0 - 0.9), T(1e-7)};
  for (size_t n : kernel_sizes()) {
    const std::vector<T> gradient = random_values<T>(n, 1 + n);
    const std::vector<T> weight = random_values<T>(n, 7000 + n);
    std::vector<T> read = random_values<T>(n, 9000 + n);
    if (n > 3) read[3] = weight[3];
    const std::vector<T> start(n, T(0.01));
    const std::string at = " n=" + std::to_string(n);
    const auto expected = [&](size_t i, T strength) {
      const volatile T first = strength * gradient[i];
      const volatile T second = first * gradient[i];
      const volatile T term = second * (weight[i] - read[i]);
      return term == T(0) ? gradient[i] : gradient[i] + term;
    };
    check_levels_agree("compensate" + at, [&] {
      std::vector<T> out = gradient;
      kernels::compensate(out.data(), out.data(), weight.data(), read.data(), factor, n);
      for (size_t i = 0; i < n; ++i) CHECK(out[i] == expected(i, factor));
      return out;
    });
    check_levels_agree("compensate_adaptive" + at, [&] {
      std::vector<T> out(n);
      std::vector<T> means = start;
      kernels::compensate_adaptive(out.data(), gradient.data(), weight.data(), read.data(),
                                   means.data(), scalars, n);
      for (size_t i = 0; i < n; ++i) {
        const volatile T kept = scalars.momentum * start[i];
        const volatile T square = gradient[i] * gradient[i];
        const volatile T added = scalars.one_minus_momentum * square;
        const volatile T mean = kept + added;
        CHECK(means[i] == mean);
        CHECK(out[i] == expected(i, factor / std::sqrt(T(mean + scalars.epsilon))));
      }
      out.insert(out.end(), means.begin(), means.end());
      return out;
    });
  }
}

template <typename T>
void check_take_delta(T divisor) {
  for (size_t n : kernel_sizes()) {
    const std::vector<T> weight = random_values<T>(n, 1 + n);
    const std::vector<T> shadow = random_values<T>(n, 9000 + n);
    check_levels_agree("take_delta n=" + std::to_string(n), [&] {
      std::vector<T> x = weight, y = shadow, negated(n);
      kernels::take_delta(x.data(), y.data(), divisor, negated.data(), n);
      for (size_t i = 0; i < n; ++i) {
        const volatile T delta = (weight[i] - shadow[i]) / divisor;
        CHECK(negated[i] == -delta);
        CHECK(y[i] == shadow[i] - negated[i]);  // as the servers add it
        CHECK(x[i] == (divisor == T(1) ? y[i] : weight[i]));
      }
      x.insert(x.end(), y.begin(), y.end());
      x.insert(x.end(), negated.begin(), negated.end());
      return x;
    });
  }
}

TEST(kernels_compensation_float) { check_compensation<float>(); }
TEST(kernels_compensation_double) { check_compensation<double>(); }

TEST(kernels_compensation_of_what_has_not_moved_is_the_gradient) {
  for (SimdLevel level : supported_levels()) {
    const kernels::ScopedSimdLevel pin(level);
    // Squares of these overflow, vanish or are signed zeros.
    std::vector<float> gradient(33, 1e30f);
    gradient[1] = -0.0f;
    gradient[32] = 1e-30f;
    const std::vector<float> weight(33, 2.5f);
    std::vector<float> out(33);
    kernels::compensate(out.data(), gradient.data(), weight.data(), weight.data(), 5.0f, 33);
    CHECK(std::memcmp(out.data(), gradient.data(), 33 * sizeof(float)) == 0);
    std::vector<float> moved(33, 1.0f);
    gradient[0] = 3.0f;
    std::fill(gradient.begin() + 2, gradient.end(), 0.25f);
    kernels::compensate(out.data(), gradient.data(), weight.data(), moved.data(), 0.0f, 33);
    CHECK(std::memcmp(out.data(), gradient.data(), 33 * sizeof(float)) == 0);
  }
}

TEST(kernels_take_delta) {
  for (const int divisor : {1, 2, 3, 50}) {
    check_take_delta<float>(static_cast<float>(divisor));
    check_take_delta<double>(divisor);
  }
}

template <typename T>
void check_merge_fresh() {
  for (size_t n : kernel_sizes()) {
    const std::vector<T> weight = random_values<T>(n, 1 + n);
    std::vector<T> shadow = random_values<T>(n, 9000 + n);
    std::vector<T> fresh = random_values<T>(n, 500 + n);
    for (size_t i = 0; i < n; i += 3) fresh[i] = shadow[i];   // nobody moved it
    for (size_t i = 1; i < n; i += 3) shadow[i] = weight[i];  // only others did
    check_levels_agree("merge_fresh n=" + std::to_string(n), [&] {
      std::vector<T> x = weight, y = shadow;
      kernels::merge_fresh(x.data(), y.data(), fresh.data(), n);
      CHECK(same_bits(y, fresh));
      for (size_t i = 0; i < n; ++i) {
        const volatile T others = fresh[i] - shadow[i];
        CHECK(x[i] == (i % 3 == 0 ? weight[i] : i % 3 == 1 ? fresh[i] : weight[i] + others));
      }
      x.insert(x.end(), y.begin(), y.end());
      return x;
    });
  }
}

TEST(kernels_merge_fresh_float) { check_merge_fresh<float>(); }
TEST(kernels_merge_fresh_double) { check_merge_fresh<double>(); }

TEST(kernels_merge_fresh_leaves_what_nobody_moved) {
  // Infinity less itself is no number, and -0.0 equals 0.0.
  const float infinity = std::numeric_limits<float>::infinity();
  for (SimdLevel level : supported_levels()) {
    const kernels::ScopedSimdLevel pin(level);
    std::vector<float> x(37, -0.0f), y(37, infinity), z(37, infinity);
    y[3] = z[3] = 0.0f;
    const std::vector<float> before = x;
    kernels::merge_fresh(x.data(), y.data(), z.data(), x.size());
    CHECK(same_bits(x, before));
  }
}

TEST(kernels_elementwise_float) { check_elementwise<float>(); }
TEST(kernels_elementwise_double) { check_elementwise<double>(); }

TEST(kernels_squared_norm_is_the_sixteen_lane_tree) {
  for (size_t n : {size_t{5}, size_t{16}, size_t{37}, size_t{4099}}) {
    const std::vector<double> values = random_values<double>(n, n);
    double lanes[16] = {};
    for (size_t i = 0; i < n; ++i) lanes[i % 16] += values[i] * values[i];
    for (size_t width = 8; width > 0; width /= 2) {
      for (size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    }
    CHECK_EQ(kernels::squared_norm(values.data(), n), lanes[0]);
  }
}

template <typename T>
void check_all_finite() {
  using Limits = std::numeric_limits<T>;
  for (SimdLevel level : supported_levels()) {
    const kernels::ScopedSimdLevel pin(level);
    for (size_t n : {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{67}}) {
      std::vector<T> values = random_values<T>(n, 3);
      for (size_t at = 0; at < n; ++at) {
        for (const T other : {Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity()}) {
          const T before = std::exchange(values[at], other);
          CHECK(!kernels::all_finite(values.data(), n));
          values[at] = before;
        }
        values[at] = at % 2 == 0 ? Limits::max() : -Limits::denorm_min();
      }
      CHECK(kernels::all_finite(values.data(), n));
    }
  }
}

TEST(kernels_all_finite_finds_each_that_is_not) {
  check_all_finite<float>();
  check_all_finite<double>();
}

TEST(kernels_clamp_keeps_nan_and_bounds_infinity) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (SimdLevel level : supported_levels()) {
    const kernels::ScopedSimdLevel pin(level);
    std::vector<float> values(33, std::nanf(""));
    values[3] = infinity;
    values[32] = -infinity;
    kernels::clamp(values.data(), -1.0f, 1.0f, values.size());
    CHECK(std::isnan(values[0]));
    CHECK_EQ(values[3], 1.0f);
    CHECK_EQ(values[32], -1.0f);
  }
}

TEST(kernels_level_can_be_pinned_and_is_restored) {
  const SimdLevel before = kernels::simd_level();
  {
    const kernels::ScopedSimdLevel pin(SimdLevel::kScalar);
    CHECK_EQ(kernels::simd_level(), SimdLevel::kScalar);
  }
  CHECK_EQ(kernels::simd_level(), before);
  if (kernels::detected_simd_level() < SimdLevel::kAvx512) {
    CHECK_THROWS(kernels::ScopedSimdLevel(SimdLevel::kAvx512), std::invalid_argument);
  }
}

TEST(kernels_aligned_buffer_is_zero_and_aligned) {
  for (size_t size : {size_t{1}, size_t{1000}, size_t{1} << 20}) {
    kernels::AlignedBuffer<float> buffer(size);
    CHECK_EQ(buffer.size(), size);
    CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % kernels::kCacheLineBytes, 0u);
    CHECK_EQ(buffer[0], 0.0f);
    CHECK_EQ(buffer[size - 1], 0.0f);
    buffer[size - 1] = 2.0f;
    kernels::AlignedBuffer<float> moved = std::move(buffer);
    CHECK_EQ(moved[size - 1], 2.0f);
  }
  CHECK(kernels::AlignedBuffer<double>(0).empty());
  CHECK_THROWS(kernels::AlignedBuffer<double>(SIZE_MAX / 4), std::bad_alloc);
}

}  // namespace
}  // namespace cpudist::testing
