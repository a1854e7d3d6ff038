// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Optimizer updates: the same bits at every vector level, the formulas against plain loops in
// long double, and the rules of the first step. tests/ops/test_ops.py has the parity with torch.

#include <cmath>

#include "kernels/optimizers.h"
#include "support/kernels_common.h"

namespace cpudist::testing {
namespace {

using kernels::OptimizerConfig;
using kernels::OptimizerKind;

OptimizerConfig config_of(OptimizerKind kind) {
  OptimizerConfig config;
  config.kind = kind;
  config.lr = 0.05;
  config.beta1 = 0.9;
  config.beta2 = 0.999;
  config.alpha = 0.99;
  config.eps = 1e-8;
  config.lr_power = -0.5;
  return config;
}

std::vector<OptimizerConfig> all_configs() {
  std::vector<OptimizerConfig> configs;
  for (uint32_t kind = 0; kind < kernels::kOptimizerKindCount; ++kind) {
    OptimizerConfig plain = config_of(static_cast<OptimizerKind>(kind));
    configs.push_back(plain);
    OptimizerConfig full = plain;
    full.weight_decay = 0.01;
    full.momentum = 0.9;
    full.lr_decay = 0.1;
    full.initial_accumulator = 0.2;
    full.l1 = 0.01;
    full.l2 = 0.02;
    full.beta1 = 0.4;  // lerp takes its far end
    configs.push_back(full);
    if (plain.kind == OptimizerKind::kSgd) {
      full.flags = kernels::kOptimizerNesterov;
      configs.push_back(full);
    }
    if (plain.kind == OptimizerKind::kFtrl) {
      full.lr_power = -0.7;
      configs.push_back(full);
    }
  }
  return configs;
}

// Three updates of n weights as one row; weights, then state.
template <typename T>
std::vector<T> run_updates(const OptimizerConfig& config, size_t n) {
  std::vector<T> weight = random_values<T>(n, 11);
  std::vector<T> state(kernels::state_elements(config, n, n));
  if (n > 0) kernels::init_state(config, state.data(), n, n);
  for (int64_t step = 1; step <= 3; ++step) {
    const std::vector<T> grad = random_values<T>(n, static_cast<uint64_t>(100 + step));
    kernels::update(kernels::make_step<T>(config, step), weight.data(), state.data(), grad.data(),
                    n, n);
  }
  weight.insert(weight.end(), state.begin(), state.end());
  return weight;
}

template <typename T>
void check_levels() {
  for (const OptimizerConfig& config : all_configs()) {
    CHECK(kernels::find_config_error(config) == nullptr);
    for (size_t n : kernel_sizes()) {
      check_levels_agree("update kind=" + std::to_string(static_cast<uint32_t>(config.kind)) +
                             " n=" + std::to_string(n),
                         [&] { return run_updates<T>(config, n); });
    }
    for (double value : run_updates<double>(config, 429)) CHECK(std::isfinite(value));
  }
}

TEST(kernels_update_levels_agree_float) { check_levels<float>(); }
TEST(kernels_update_levels_agree_double) { check_levels<double>(); }

template <typename T>
void check_rows_equal_single_updates() {
  const size_t rows = 23;
  for (const OptimizerConfig& config : all_configs()) {
    for (size_t dim : {size_t{1}, size_t{8}, size_t{16}, size_t{33}, size_t{100}}) {
      const size_t states = kernels::state_elements(config, dim, dim);
      const size_t stride = dim + 2;
      const std::vector<T> grads = random_values<T>(rows * stride, dim);
      std::vector<T> weight = random_values<T>(rows * dim, 5);
      std::vector<T> state(rows * states);
      std::vector<T*> weight_rows;
      std::vector<T*> state_rows;
      std::vector<const T*> grad_rows;
      for (size_t i = 0; i < rows; ++i) {
        const size_t row = (i * 7) % rows;
        weight_rows.push_back(weight.data() + row * dim);
        grad_rows.push_back(grads.data() + i * stride);
        state_rows.push_back(state.data() + row * states);
        kernels::init_state(config, state_rows.back(), dim, dim);
      }
      std::vector<T> expected_weight = weight;
      std::vector<T> expected_state = state;
      const auto scalars = kernels::make_step<T>(config, 4);
      for (size_t i = 0; i < rows; ++i) {
        const size_t row = (i * 7) % rows;
        kernels::update(scalars, expected_weight.data() + row * dim,
                        expected_state.data() + row * states, grads.data() + i * stride, dim, dim);
      }
      kernels::update_rows(scalars, weight_rows.data(), states > 0 ? state_rows.data() : nullptr,
                           grad_rows.data(), rows, dim);
      CHECK(same_bits(weight, expected_weight));
      CHECK(same_bits(state, expected_state));
    }
  }
}

TEST(kernels_update_rows_equals_single_updates_float) { check_rows_equal_single_updates<float>(); }
TEST(kernels_update_rows_equals_single_updates_double) {
  check_rows_equal_single_updates<double>();
}

TEST(kernels_sgd_first_momentum_step_takes_the_gradient) {
  OptimizerConfig config = config_of(OptimizerKind::kSgd);
  config.momentum = 0.9;
  config.dampening = 0.5;
  double weight = 1.0;
  double state = 123.0;  // must be overwritten at the first step
  const double grad = 2.0;
  kernels::update(kernels::make_step<double>(config, 1), &weight, &state, &grad, 1, 1);
  CHECK_EQ(state, 2.0);
  CHECK_EQ(weight, 1.0 - 0.05 * 2.0);
  kernels::update(kernels::make_step<double>(config, 2), &weight, &state, &grad, 1, 1);
  CHECK_EQ(state, 2.0 * 0.9 + 0.5 * 2.0);
}

TEST(kernels_row_wise_adagrad_has_one_state_per_row) {
  OptimizerConfig config = config_of(OptimizerKind::kRowWiseAdagrad);
  config.initial_accumulator = 0.5;
  CHECK_EQ(kernels::state_elements(config, 12, 4), 3u);
  std::vector<double> weight(12, 1.0);
  std::vector<double> state(3);
  kernels::init_state(config, state.data(), 12, 4);
  const std::vector<double> grad = random_values<double>(12, 3);
  const auto scalars = kernels::make_step<double>(config, 1);
  kernels::update(scalars, weight.data(), state.data(), grad.data(), 12, 4);
  for (size_t row = 0; row < 3; ++row) {
    double mean = 0;
    for (size_t d = 0; d < 4; ++d) mean += grad[row * 4 + d] * grad[row * 4 + d] / 4;
    CHECK_NEAR(state[row], 0.5 + mean, 1e-12);
    for (size_t d = 0; d < 4; ++d) {
      const double step = 0.05 * grad[row * 4 + d] / (std::sqrt(0.5 + mean) + 1e-8);
      CHECK_NEAR(weight[row * 4 + d], 1.0 - step, 1e-12);
    }
  }
  CHECK_THROWS(kernels::update(scalars, weight.data(), state.data(), grad.data(), 12, 5),
               std::invalid_argument);
}

// Algorithm 1 of McMahan et al. 2013, in long double.
TEST(kernels_ftrl_follows_the_paper) {
  for (double power : {-0.5, -0.8}) {
    OptimizerConfig config = config_of(OptimizerKind::kFtrl);
    config.l1 = 0.3;
    config.l2 = 0.1;
    config.eps = 1.0;  // beta
    config.initial_accumulator = 0.1;
    config.lr_power = power;
    const size_t n = 40;
    std::vector<double> weight(n, 0.25);
    std::vector<double> state(2 * n);
    kernels::init_state(config, state.data(), n, n);
    std::vector<long double> w(n, 0.25L), z(n, 0.0L), sum(n, 0.1L);
    size_t zeros = 0;
    for (int64_t step = 1; step <= 5; ++step) {
      const std::vector<double> grad = random_values<double>(n, static_cast<uint64_t>(step));
      kernels::update(kernels::make_step<double>(config, step), weight.data(), state.data(),
                      grad.data(), n, n);
      for (size_t i = 0; i < n; ++i) {
        const long double g = grad[i];
        const long double root = std::pow(sum[i] + g * g, -static_cast<long double>(power));
        const long double sigma =
            (root - std::pow(sum[i], -static_cast<long double>(power))) / 0.05L;
        z[i] += g - sigma * w[i];
        sum[i] += g * g;
        const long double sign = z[i] < 0 ? -1 : 1;
        w[i] =
            std::fabs(z[i]) <= 0.3L ? 0.0L : -(z[i] - sign * 0.3L) / ((1.0L + root) / 0.05L + 0.1L);
        CHECK_NEAR(weight[i], w[i], 1e-9);
        zeros += weight[i] == 0.0 ? 1 : 0;
      }
    }
    CHECK(zeros > 0);  // l1 makes weights sparse
  }
}

TEST(kernels_ftrl_keeps_a_weight_without_gradient) {
  const OptimizerConfig config = config_of(OptimizerKind::kFtrl);
  std::vector<float> weight(20, 0.5f);
  std::vector<float> state(40, 0.0f);
  const std::vector<float> grad(20, 0.0f);
  kernels::update(kernels::make_step<float>(config, 1), weight.data(), state.data(), grad.data(),
                  20, 20);
  for (float value : weight) CHECK_EQ(value, 0.5f);
}

TEST(kernels_state_layout_is_documented) {
  CHECK_EQ(kernels::state_elements(config_of(OptimizerKind::kSgd), 10, 5), 0u);
  OptimizerConfig momentum = config_of(OptimizerKind::kSgd);
  momentum.momentum = 0.9;
  CHECK_EQ(kernels::state_elements(momentum, 10, 5), 10u);
  momentum.kind = OptimizerKind::kRmsprop;
  CHECK_EQ(kernels::state_elements(momentum, 10, 5), 20u);
  CHECK_EQ(kernels::state_elements(config_of(OptimizerKind::kRmsprop), 10, 5), 10u);
  CHECK_EQ(kernels::state_elements(config_of(OptimizerKind::kAdam), 10, 5), 20u);
  OptimizerConfig ftrl = config_of(OptimizerKind::kFtrl);
  ftrl.initial_accumulator = 0.25;
  std::vector<float> state(4, 9.0f);
  kernels::init_state(ftrl, state.data(), 2, 2);
  CHECK(state == (std::vector<float>{0.0f, 0.0f, 0.25f, 0.25f}));
}

TEST(kernels_config_errors_are_named) {
  OptimizerConfig config = config_of(OptimizerKind::kSgd);
  config.kind = static_cast<OptimizerKind>(99);
  CHECK(kernels::find_config_error(config) != nullptr);
  config = config_of(OptimizerKind::kSgd);
  config.flags = kernels::kOptimizerNesterov;
  CHECK(kernels::find_config_error(config) != nullptr);
  config = config_of(OptimizerKind::kAdam);
  config.beta1 = 1.0;
  CHECK(kernels::find_config_error(config) != nullptr);
  config = config_of(OptimizerKind::kAdam);
  config.lr = std::nan("");
  CHECK(kernels::find_config_error(config) != nullptr);
  config = config_of(OptimizerKind::kFtrl);
  config.lr = 0;
  CHECK(kernels::find_config_error(config) != nullptr);
}

TEST(kernels_step_dependence_is_told) {
  CHECK(kernels::step_dependent(config_of(OptimizerKind::kAdam)));
  CHECK(!kernels::step_dependent(config_of(OptimizerKind::kAdagrad)));
  CHECK(!kernels::step_dependent(config_of(OptimizerKind::kSgd)));
  OptimizerConfig config = config_of(OptimizerKind::kAdagrad);
  config.lr_decay = 0.1;
  CHECK(kernels::step_dependent(config));
}

TEST(kernels_step_cache_equals_make_step) {
  const OptimizerConfig config = config_of(OptimizerKind::kAdam);
  kernels::StepCache<double> cache(config);
  for (int64_t step : {1, 2, 65, 1, 66, 1000000, 2}) {
    CHECK_EQ(cache.at(step).negative_lr, kernels::make_step<double>(config, step).negative_lr);
    CHECK_EQ(cache.at(step).first_update, step == 1);
  }
}

}  // namespace
}  // namespace cpudist::testing
