// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Fewer bits: exact rounding against a naive reference, special numbers, equal bits on every level.

#include "kernels/quantize.h"

#include <bit>
#include <cmath>
#include <limits>

#include "support/kernels_common.h"

namespace cpudist::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float half_value(uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const double fraction = half & 1023;
  double value =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) value = fraction == 0 ? kInfinity : NAN;
  return static_cast<float>((half & 0x8000) != 0 ? -value : value);
}

float bfloat16_value(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// The nearest of all finite numbers of the format, the even one of two as near.
uint16_t nearest(float value, float (*meaning)(uint16_t), uint16_t largest) {
  const double magnitude = std::fabs(static_cast<double>(value));
  uint16_t below = 0;
  uint16_t above = largest;
  while (above - below > 1) {
    const auto middle = static_cast<uint16_t>((below + above) / 2);
    (static_cast<double>(meaning(middle)) <= magnitude ? below : above) = middle;
  }
  const double down = magnitude - static_cast<double>(meaning(below));
  const double up = static_cast<double>(meaning(above)) - magnitude;
  const bool rises = up < down || (up == down && above % 2 == 0);
  return static_cast<uint16_t>((rises ? above : below) | (std::signbit(value) ? 0x8000 : 0));
}

std::vector<float> mixed_values(size_t n, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<float> values(n);
  for (float& value : values) {
    do value = std::bit_cast<float>(static_cast<uint32_t>(engine()));
    while (!std::isfinite(value));
    if (engine() % 2 == 0) value = std::ldexp(static_cast<float>(engine() % 8192), -30);
  }
  return values;
}

std::vector<float> special_values() {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const float huge = std::numeric_limits<float>::max();
  return {0.0f,     -0.0f,      tiny,       -tiny,     huge,      -huge,      65504.0f,
          65519.9f, 65520.0f,   -1e30f,     0x1p-14f,  0x1p-24f,  0x1p-25f,   0x1.8p-25f,
          1.0f,     0x1.004p0f, 0x1.00cp0f, 0x1.01p0f, 0x1.03p0f, 0x1.fep127f};
}

template <typename Encode>
std::vector<uint16_t> encoded(const std::vector<float>& values, Encode encode) {
  std::vector<uint16_t> out(values.size());
  encode(values.data(), out.data(), values.size());
  return out;
}

TEST(quantize_rounds_to_the_nearest_number) {
  std::vector<float> values = mixed_values(3000, 5);
  for (const float value : special_values()) values.push_back(value);
  const auto halves = encoded(values, kernels::to_half);
  const auto short_floats = encoded(values, kernels::to_bfloat16);
  for (size_t i = 0; i < values.size(); ++i) {
    CHECK_EQ(halves[i], nearest(values[i], half_value, 0x7bff));
    CHECK_EQ(short_floats[i], nearest(values[i], bfloat16_value, 0x7f7f));
  }
}

TEST(quantize_keeps_what_is_not_finite) {
  const std::vector<float> values = {kInfinity, -kInfinity, NAN, -NAN};
  CHECK(encoded(values, kernels::to_half) ==
        (std::vector<uint16_t>{0x7c00, 0xfc00, 0x7e00, 0xfe00}));
  CHECK(encoded(values, kernels::to_bfloat16) ==
        (std::vector<uint16_t>{0x7f80, 0xff80, 0x7fc0, 0xffc0}));
}

TEST(quantize_decodes_every_number) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> values(all.size());
  kernels::from_half(all.data(), values.data(), all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const float expected = half_value(all[i]);
    if (std::isnan(expected)) {
      CHECK(std::isnan(values[i]));
    } else {
      CHECK(std::bit_cast<uint32_t>(values[i]) == std::bit_cast<uint32_t>(expected));
    }
  }
  kernels::from_bfloat16(all.data(), values.data(), all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    CHECK_EQ(std::bit_cast<uint32_t>(values[i]), static_cast<uint32_t>(i) << 16);
  }
}

struct Int8Rows {
  std::vector<int8_t> numbers;
  std::vector<uint16_t> scales;
  std::vector<float> values;
};

Int8Rows as_int8(const std::vector<float>& rows, size_t dim) {
  const size_t count = dim == 0 ? 0 : rows.size() / dim;
  Int8Rows out{std::vector<int8_t>(rows.size()), std::vector<uint16_t>(count),
               std::vector<float>(rows.size())};
  kernels::to_int8(rows.data(), count, dim, out.numbers.data(), out.scales.data());
  kernels::from_int8(out.numbers.data(), out.scales.data(), count, dim, out.values.data());
  return out;
}

TEST(quantize_int8_is_within_half_a_scale) {
  for (const size_t dim : {1u, 3u, 16u, 17u, 64u, 128u}) {
    const std::vector<float> rows = random_values<float>(50 * dim, dim);
    const Int8Rows found = as_int8(rows, dim);
    for (size_t i = 0; i < rows.size(); ++i) {
      const float scale = bfloat16_value(found.scales[i / dim]);
      CHECK(found.numbers[i] >= -127);
      CHECK_EQ(found.numbers[i], std::nearbyint(rows[i] * (1.0f / scale)));
      CHECK(std::fabs(rows[i] - found.values[i]) <= scale * 0.5001f);
    }
    const Int8Rows again = as_int8(found.values, dim);
    CHECK(again.numbers == found.numbers);
    CHECK(again.scales == found.scales);
    CHECK(same_bits(again.values, found.values));
  }
}

TEST(quantize_int8_of_special_rows) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const float huge = std::numeric_limits<float>::max();
  const std::vector<float> rows = {0.0f, -0.0f,     tiny, -0x1p-121f, 1.0f,
                                   NAN,  kInfinity, 2.0f, huge,       -huge};
  const Int8Rows found = as_int8(rows, 2);
  for (size_t i = 0; i < 4; ++i) CHECK(found.values[i] == 0.0f);
  for (size_t i = 4; i < 8; ++i) CHECK(std::isnan(found.values[i]));
  CHECK_EQ(found.numbers[8], 127);
  CHECK_EQ(found.numbers[9], -127);
  CHECK(std::fabs(found.values[8] / huge - 1.0f) < 0.01f);
}

TEST(quantize_residues_are_what_is_not_sent) {
  const std::vector<float> meant = {1.5f, kInfinity, NAN, 2.0f};
  const std::vector<float> sent = {1.0f, kInfinity, 1.0f, NAN};
  std::vector<float> residue(4);
  kernels::residue_of(meant.data(), sent.data(), residue.data(), 4);
  CHECK(residue == (std::vector<float>{0.5f, 0.0f, 0.0f, 0.0f}));
}

TEST(quantize_levels_agree) {
  for (const size_t n : kernel_sizes()) {
    std::vector<float> values = mixed_values(n, 100 + n);
    for (size_t i = 0; i < n; i += 7) values[i] = special_values()[i % special_values().size()];
    if (n > 20) values[20] = NAN;
    const std::string at = " n=" + std::to_string(n);
    check_levels_agree("to_half" + at, [&] { return encoded(values, kernels::to_half); });
    check_levels_agree("to_bfloat16" + at, [&] { return encoded(values, kernels::to_bfloat16); });
    const auto halves = encoded(values, kernels::to_half);
    check_levels_agree("from_half" + at, [&] {
      std::vector<float> out(n);
      kernels::from_half(halves.data(), out.data(), n);
      return out;
    });
    check_levels_agree("from_bfloat16" + at, [&] {
      std::vector<float> out(n);
      kernels::from_bfloat16(halves.data(), out.data(), n);
      return out;
    });
    check_levels_agree("int8" + at, [&] { return as_int8(values, n).values; });
    check_levels_agree("int8 numbers" + at, [&] { return as_int8(values, n).numbers; });
    check_levels_agree("int8 scales" + at, [&] { return as_int8(values, n).scales; });
  }
}

}  // namespace
}  // namespace cpudist::testing
