// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Programs are run on a few hundred elements at a time, step by step.

#include "kernels/initial.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/hash.h"
#include "kernels/levels/table.h"

namespace cpudist::kernels {
namespace {

constexpr size_t kRunElements = 512;
constexpr double kHalfUnit = 0x1p-54;  // of the fractions that are drawn
constexpr double kRootOfHalf = 0x1.6a09e667f3bcdp-1;

bool replaces(InitialOp op) {
  return op == InitialOp::kNormal || op == InitialOp::kUniform || op == InitialOp::kFill;
}

bool draws(InitialOp op) { return op == InitialOp::kNormal || op == InitialOp::kUniform; }

const char* find_step_error(const InitialStep& step) {
  const auto& [op, a, b] = step;
  const bool finite = std::isfinite(a) && std::isfinite(b);
  if (std::isnan(a) || std::isnan(b)) return "an initial program with an argument that is NaN";
  switch (op) {
    case InitialOp::kNormal:
      return finite && b >= 0 ? nullptr : "normal without a finite mean and deviation >= 0";
    case InitialOp::kUniform:
      return finite && a <= b && std::isfinite(b - a) ? nullptr
                                                      : "uniform without finite bounds in order";
    case InitialOp::kClamp:
      return a <= b ? nullptr : "clamp with a lower bound above the upper one";
    case InitialOp::kFill:
    case InitialOp::kMul:
    case InitialOp::kAdd:
      return b == 0 ? nullptr : "a step of an initial program with a second argument of none";
    case InitialOp::kErfinv:
      return a == 0 && b == 0 ? nullptr : "erfinv with an argument";
  }
  return "an unknown step of an initial program";
}

}  // namespace

const char* initial_op_name(InitialOp op) {
  switch (op) {
    case InitialOp::kNormal:
      return "normal";
    case InitialOp::kUniform:
      return "uniform";
    case InitialOp::kFill:
      return "fill";
    case InitialOp::kMul:
      return "mul";
    case InitialOp::kAdd:
      return "add";
    case InitialOp::kClamp:
      return "clamp";
    case InitialOp::kErfinv:
      return "erfinv";
  }
  return "unknown";
}

const char* find_initial_error(std::span<const InitialStep> steps,
                               std::span<const RowOverride> overrides) {
  if (steps.size() > kInitialStepsMax) return "an initial program of more than 8 steps";
  if (overrides.size() > kRowOverridesMax) return "more than 16 runs of constant rows";
  if (!steps.empty() && !replaces(steps.front().op)) {
    return "an initial program that does not begin with normal, uniform or fill";
  }
  for (const InitialStep& step : steps) {
    if (const char* what = find_step_error(step)) return what;
  }
  for (const RowOverride& rows : overrides) {
    const bool to_last = rows.end == 0 && rows.begin > 0;
    if (!to_last && rows.begin >= rows.end) return "a run of constant rows without a row";
    if (std::isnan(rows.value)) return "constant rows that are NaN";
  }
  return nullptr;
}

InitialRows::InitialRows(std::span<const InitialStep> steps, std::span<const RowOverride> overrides,
                         uint64_t salt, uint64_t seed)
    : overrides_(overrides.begin(), overrides.end()), salt_(salt), seed_(seed) {
  for (const InitialStep& step : steps) {
    if (replaces(step.op)) steps_.clear();
    steps_.push_back(step);
  }
}

void InitialRows::fill(std::span<const int64_t> keys, size_t dim, float* out) const {
  if (steps_.empty()) {
    std::fill_n(out, keys.size() * dim, 0.0f);
    override_rows(keys, dim, out);
    return;
  }
  const InitialKernels& kernels = current_kernels().initial;
  const bool drawn = draws(steps_.front().op);
  std::array<double, kRunElements> values;
  size_t count = 0;
  float* target = out;
  for (const int64_t key : keys) {
    const uint64_t base = mix64(static_cast<uint64_t>(key) ^ salt_ ^ seed_);
    for (size_t begin = 0; begin < dim;) {
      const size_t n = std::min(kRunElements - count, dim - begin);
      if (drawn) kernels.draw(base, begin, values.data() + count, n);
      count += n;
      begin += n;
      if (count < kRunElements) continue;
      finish(values.data(), count, target);
      target += count;
      count = 0;
    }
  }
  finish(values.data(), count, target);
  override_rows(keys, dim, out);
}

void InitialRows::finish(double* values, size_t n, float* out) const {
  const InitialKernels& kernels = current_kernels().initial;
  for (const auto& [op, a, b] : steps_) {
    switch (op) {
      case InitialOp::kNormal:
        // Of the middle of the interval that the fraction begins; exact, and never 0 or 1.
        for (size_t i = 0; i < n; ++i) values[i] = values[i] - 0.5 + kHalfUnit;
        kernels.normal_quantiles(values, n);
        for (size_t i = 0; i < n; ++i) values[i] = a + b * values[i];
        break;
      case InitialOp::kUniform:
        for (size_t i = 0; i < n; ++i) values[i] = a + (b - a) * values[i];
        break;
      case InitialOp::kFill:
        std::fill_n(values, n, a);
        break;
      case InitialOp::kMul:
        for (size_t i = 0; i < n; ++i) values[i] = values[i] * a;
        break;
      case InitialOp::kAdd:
        for (size_t i = 0; i < n; ++i) values[i] = values[i] + a;
        break;
      case InitialOp::kClamp:
        for (size_t i = 0; i < n; ++i) {
          const double raised = values[i] < a ? a : values[i];
          values[i] = raised > b ? b : raised;
        }
        break;
      case InitialOp::kErfinv:
        for (size_t i = 0; i < n; ++i) values[i] = values[i] * 0.5;
        kernels.normal_quantiles(values, n);
        for (size_t i = 0; i < n; ++i) values[i] = values[i] * kRootOfHalf;
        break;
    }
  }
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<float>(values[i]);
}

void InitialRows::override_rows(std::span<const int64_t> keys, size_t dim, float* out) const {
  for (const RowOverride& rows : overrides_) {
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto key = static_cast<uint64_t>(keys[i]);
      if (key - rows.begin >= rows.end - rows.begin) continue;  // modulo 2^64
      std::fill_n(out + i * dim, dim, static_cast<float>(rows.value));
    }
  }
}

}  // namespace cpudist::kernels
