// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Initial values: the same bits however they are asked for, the distribution that was meant, and
// figures that later versions must find again.

#include "kernels/initial.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "base/crc32c.h"
#include "kernels/hash.h"
#include "support/kernels_common.h"

namespace cpudist::testing {
namespace {

using kernels::InitialOp;
using kernels::InitialRows;
using kernels::InitialStep;
using kernels::RowOverride;
using Program = std::vector<InitialStep>;

constexpr uint64_t kSalt = 0x1234567890abcdef;
constexpr uint64_t kSeed = 42;

// As torch's trunc_normal_ draws: a uniform part of the distribution function, turned into values.
Program truncated(double mean, double deviation, double low, double high) {
  const auto below = [&](double x) { return std::erf((x - mean) / deviation / std::sqrt(2.0)); };
  return {{InitialOp::kUniform, below(low), below(high)},
          {InitialOp::kErfinv},
          {InitialOp::kMul, deviation * std::sqrt(2.0)},
          {InitialOp::kAdd, mean},
          {InitialOp::kClamp, low, high}};
}

std::vector<Program> programs() {
  return {{},
          {{InitialOp::kFill, 0.1}},
          {{InitialOp::kNormal, 0.0, 1.0}},
          {{InitialOp::kNormal, 3.0, 0.02}},
          {{InitialOp::kUniform, -0.5, 0.25}},
          {{InitialOp::kFill, 2.0}, {InitialOp::kNormal, 0.0, 1.0}, {InitialOp::kMul, 0.1}},
          truncated(0.0, 1.0, -2.0, 2.0)};
}

std::vector<float> rows_of(const Program& program, const std::vector<int64_t>& keys, size_t dim,
                           uint64_t seed = kSeed, std::vector<RowOverride> overrides = {}) {
  CHECK(kernels::find_initial_error(program, overrides) == nullptr);
  std::vector<float> out(keys.size() * dim, NAN);
  InitialRows(program, overrides, kSalt, seed).fill(keys, dim, out.data());
  return out;
}

std::vector<int64_t> first_keys(size_t n) {
  std::vector<int64_t> keys(n);
  std::iota(keys.begin(), keys.end(), 0);
  return keys;
}

TEST(initial_levels_agree) {
  for (const Program& program : programs()) {
    for (const size_t dim : {1u, 3u, 16u, 17u, 129u, 700u, 4099u}) {
      const auto keys = random_keys(dim > 1000 ? 3 : 40, 1ll << 54, dim);
      check_levels_agree("initial rows of " + std::to_string(dim),
                         [&] { return rows_of(program, keys, dim); });
    }
  }
}

TEST(initial_rows_hang_on_their_keys_only) {
  const auto keys = random_keys(300, 1ll << 62, 5);
  for (const Program& program : programs()) {
    for (const size_t dim : {1u, 5u, 16u, 600u}) {
      const auto together = rows_of(program, keys, dim);
      std::vector<float> one(dim);
      const InitialRows rows(program, {}, kSalt, kSeed);
      for (size_t i = 0; i < keys.size(); ++i) {
        rows.fill({&keys[i], 1}, dim, one.data());
        CHECK(std::equal(one.begin(), one.end(), together.begin() + i * dim));
      }
      // Wider rows begin as narrower ones.
      if (dim > 1) CHECK_EQ(rows_of(program, keys, 1)[7], together[7 * dim]);
    }
  }
}

TEST(initial_rows_differ_by_seed_key_and_salt) {
  const Program normal = {{InitialOp::kNormal, 0.0, 1.0}};
  const auto keys = first_keys(1000);
  auto values = rows_of(normal, keys, 16);
  CHECK(values != rows_of(normal, keys, 16, kSeed + 1));
  std::vector<float> other(values.size());
  InitialRows(normal, {}, kSalt + 1, kSeed).fill(keys, 16, other.data());
  CHECK(values != other);
  std::sort(values.begin(), values.end());
  // Of 16,000 numbers of 24 bits some are equal by chance, as many as there are pairs.
  const auto distinct = std::unique(values.begin(), values.end()) - values.begin();
  CHECK(distinct > 15900);
}

// Kolmogorov and Smirnov's distance times sqrt(n); above 1.63 with probability 0.01, for a sample
// drawn anew. This one never changes.
double distance(std::vector<float> values, const std::function<double(double)>& distribution) {
  std::sort(values.begin(), values.end());
  const double n = static_cast<double>(values.size());
  double most = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double meant = distribution(values[i]);
    most = std::max(most, std::fabs(meant - static_cast<double>(i) / n));
    most = std::max(most, std::fabs(meant - static_cast<double>(i + 1) / n));
  }
  return most * std::sqrt(n);
}

double normal_below(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

TEST(initial_values_are_distributed_as_they_say) {
  const auto keys = first_keys(20000);
  CHECK(distance(rows_of({{InitialOp::kNormal, 0.0, 1.0}}, keys, 16), normal_below) < 1.63);
  CHECK(distance(rows_of({{InitialOp::kNormal, 2.0, 0.5}}, keys, 16),
                 [](double x) { return normal_below((x - 2.0) / 0.5); }) < 1.63);
  CHECK(distance(rows_of({{InitialOp::kUniform, -1.0, 3.0}}, keys, 16),
                 [](double x) { return (x + 1.0) / 4.0; }) < 1.63);
  CHECK(distance(rows_of(truncated(0.5, 2.0, -1.0, 4.0), keys, 16), [](double x) {
          const double low = normal_below(-0.75);
          return (normal_below((x - 0.5) / 2.0) - low) / (normal_below(1.75) - low);
        }) < 1.63);
  // Each column by itself, and one key's.
  CHECK(distance(rows_of({{InitialOp::kNormal, 0.0, 1.0}}, keys, 1), normal_below) < 1.63);
  CHECK(distance(rows_of({{InitialOp::kNormal, 0.0, 1.0}}, {77}, 65536), normal_below) < 1.63);
}

TEST(initial_values_of_neighbours_do_not_hang_together) {
  const size_t rows = 20000;
  const auto values = rows_of({{InitialOp::kNormal, 0.0, 1.0}}, first_keys(rows), 8);
  const auto correlation = [&](size_t shift) {
    double sum = 0;
    for (size_t i = 0; i + shift < values.size(); ++i) sum += double{values[i]} * values[i + shift];
    return std::fabs(sum) / std::sqrt(static_cast<double>(values.size() - shift));
  };
  for (const size_t shift : {1u, 2u, 7u, 8u, 9u, 16u, 64u}) CHECK(correlation(shift) < 3.5);
}

TEST(initial_quantiles_are_right_to_the_last_digits) {
  // What erfinv makes of numbers over the whole range, against the error function of it.
  for (int i = -999; i <= 999; ++i) {
    const double x = i / 1000.0;
    const float found = rows_of({{InitialOp::kFill, x}, {InitialOp::kErfinv}}, {1}, 1)[0];
    CHECK_NEAR(std::erf(double{found}), x, 1e-7);
  }
  // In double the tails, too: 1 - x is exact.
  for (const double rest : {1e-3, 1e-6, 1e-9, 1e-12, 1e-15}) {
    const double x = 1.0 - rest;
    const Program scaled = {{InitialOp::kFill, x}, {InitialOp::kErfinv}, {InitialOp::kMul, 1e6}};
    const double found = double{rows_of(scaled, {1}, 1)[0]} * 1e-6;
    CHECK_NEAR(std::erfc(found) / (1.0 - x), 1.0, 3e-6);
  }
}

TEST(initial_steps_at_their_edges) {
  const auto one = [](const Program& program) { return rows_of(program, {9}, 1)[0]; };
  const float infinity = std::numeric_limits<float>::infinity();
  const auto erfinv = [&](double x) { return one({{InitialOp::kFill, x}, {InitialOp::kErfinv}}); };
  CHECK_EQ(erfinv(1.0), infinity);
  CHECK_EQ(erfinv(-1.0), -infinity);
  CHECK_EQ(erfinv(0.0), 0.0f);
  CHECK(std::isnan(erfinv(1.5)));
  CHECK(std::isnan(erfinv(-1.5)));
  CHECK_EQ(one({{InitialOp::kFill, 1.0}, {InitialOp::kErfinv}, {InitialOp::kClamp, -2.0, 2.0}}),
           2.0f);
  CHECK_EQ(one({{InitialOp::kNormal, 0.25, 0.0}}), 0.25f);
  CHECK_EQ(one({{InitialOp::kUniform, 0.25, 0.25}}), 0.25f);
  CHECK_EQ(one({{InitialOp::kFill, 0.1}, {InitialOp::kMul, 3.0}}), static_cast<float>(0.1 * 3.0));
}

TEST(initial_overrides_win_over_the_program) {
  const Program normal = {{InitialOp::kNormal, 0.0, 1.0}};
  const int64_t last = (1ll << 62) - 1;
  const std::vector<int64_t> keys = {0, 5, 9, 10, last};
  const std::vector<RowOverride> overrides = {
      {5, 10, 7.0}, {9, 11, -1.0}, {static_cast<uint64_t>(last), 1ull << 62, 3.0}};
  const auto found = rows_of(normal, keys, 2, kSeed, overrides);
  const auto plain = rows_of(normal, keys, 2);
  CHECK(found == (std::vector<float>{plain[0], plain[1], 7, 7, -1, -1, -1, -1, 3, 3}));
  CHECK(rows_of({}, keys, 2, kSeed, overrides) ==
        (std::vector<float>{0, 0, 7, 7, -1, -1, -1, -1, 3, 3}));
}

TEST(initial_programs_that_cannot_run_are_refused) {
  const auto refused = [](const Program& program, std::vector<RowOverride> overrides = {}) {
    return kernels::find_initial_error(program, overrides) != nullptr;
  };
  const InitialStep zero = {InitialOp::kFill};
  for (const Program& program : programs()) CHECK(!refused(program));
  CHECK(!refused(Program(8, zero)));
  CHECK(refused(Program(9, zero)));
  CHECK(refused({{InitialOp::kMul, 2.0}}));
  CHECK(refused({{InitialOp::kErfinv}}));
  CHECK(refused({zero, {static_cast<InitialOp>(0)}}));
  CHECK(refused({zero, {static_cast<InitialOp>(8)}}));
  CHECK(refused({{InitialOp::kFill, NAN}}));
  CHECK(refused({{InitialOp::kFill, 0.0, 1.0}}));
  CHECK(refused({{InitialOp::kNormal, 0.0, -1.0}}));
  CHECK(refused({{InitialOp::kNormal, INFINITY, 1.0}}));
  CHECK(refused({{InitialOp::kUniform, 1.0, 0.0}}));
  CHECK(refused({{InitialOp::kUniform, -1.7e308, 1.7e308}}));
  CHECK(refused({zero, {InitialOp::kClamp, 1.0, 0.0}}));
  CHECK(!refused({zero, {InitialOp::kClamp, 1.0, INFINITY}}));
  CHECK(refused({zero, {InitialOp::kErfinv, 1.0}}));
  CHECK(!refused({}, std::vector<RowOverride>(16, {0, 1, 0})));
  CHECK(refused({}, std::vector<RowOverride>(17, {0, 1, 0})));
  CHECK(refused({}, {{1, 1, 0}}));
  CHECK(refused({}, {{0, 1, NAN}}));
}

// Rows that nobody has trained are made again whenever they are read: the bits may never change.
// tests/core/test_initial_rows.py has the same formula in Python.
TEST(initial_values_stay_what_they_were) {
  const auto crc = [](const Program& program) {
    const auto values = rows_of(program, random_keys(5000, 1ll << 54, 1), 16);
    return crc32c(values.data(), values.size() * sizeof(float));
  };
  CHECK_EQ(crc({{InitialOp::kUniform, 0.0, 1.0}}), 0x36bfd47fu);
  CHECK_EQ(crc({{InitialOp::kNormal, 0.0, 1.0}}), 0x0b185389u);
  const double within = 0.9544997361036416;  // two deviations: of numbers, as libraries' erf differ
  CHECK_EQ(crc({{InitialOp::kUniform, -within, within},
                {InitialOp::kErfinv},
                {InitialOp::kMul, 1.4142135623730951},
                {InitialOp::kClamp, -2.0, 2.0}}),
           0x2da80a25u);
}

}  // namespace
}  // namespace cpudist::testing
