// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Scalar part of the optimizers: validation, state layout, per-step coefficients, dispatch.

#include "kernels/optimizers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

#include "kernels/levels/table.h"

namespace cpudist::kernels {
namespace {

bool is_adam_family(OptimizerKind kind) {
  return kind == OptimizerKind::kAdam || kind == OptimizerKind::kSparseAdam ||
         kind == OptimizerKind::kAdamW;
}

bool is_adagrad_family(OptimizerKind kind) {
  return kind == OptimizerKind::kAdagrad || kind == OptimizerKind::kRowWiseAdagrad;
}

bool all_finite(const OptimizerConfig& c) {
  for (double value : {c.lr, c.momentum, c.dampening, c.weight_decay, c.beta1, c.beta2, c.eps,
                       c.alpha, c.lr_decay, c.initial_accumulator, c.l1, c.l2, c.lr_power}) {
    if (!std::isfinite(value)) return false;
  }
  return true;
}

double step_size(const OptimizerConfig& config, double step) {
  switch (config.kind) {
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kRowWiseAdagrad:
      return config.lr / (1.0 + (step - 1.0) * config.lr_decay);
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      return config.lr / (1.0 - std::pow(config.beta1, step));
    case OptimizerKind::kSparseAdam:
      return config.lr * std::sqrt(1.0 - std::pow(config.beta2, step)) /
             (1.0 - std::pow(config.beta1, step));
    case OptimizerKind::kSgd:
    case OptimizerKind::kRmsprop:
    case OptimizerKind::kFtrl:
      return config.lr;
  }
  return config.lr;
}

}  // namespace

const char* optimizer_kind_name(OptimizerKind kind) {
  constexpr std::array<const char*, kOptimizerKindCount> kNames{
      "sgd", "adagrad", "row_wise_adagrad", "adam", "sparse_adam", "adamw", "rmsprop", "ftrl"};
  const auto index = static_cast<uint32_t>(kind);
  return index < kNames.size() ? kNames[index] : "unknown";
}

const char* find_config_error(const OptimizerConfig& c) {
  if (static_cast<uint32_t>(c.kind) >= kOptimizerKindCount) return "optimizer kind is unknown";
  if ((c.flags & ~kOptimizerKnownFlags) != 0) return "optimizer flags have unknown bits";
  if (!all_finite(c)) return "an optimizer option is not finite";
  if (c.lr < 0) return "lr must not be negative";
  if (c.weight_decay < 0) return "weight_decay must not be negative";
  if (c.eps < 0) return "eps must not be negative";
  if (c.momentum < 0) return "momentum must not be negative";
  if (c.nesterov() && (c.kind != OptimizerKind::kSgd || c.momentum <= 0 || c.dampening != 0)) {
    return "nesterov needs SGD with momentum and no dampening";
  }
  if (is_adam_family(c.kind) && (c.beta1 < 0 || c.beta1 >= 1 || c.beta2 < 0 || c.beta2 >= 1)) {
    return "betas must be in [0, 1)";
  }
  if (c.alpha < 0) return "alpha must not be negative";
  if (c.lr_decay < 0) return "lr_decay must not be negative";
  if (c.initial_accumulator < 0) return "initial_accumulator must not be negative";
  if (c.l1 < 0 || c.l2 < 0) return "l1 and l2 must not be negative";
  if (c.kind == OptimizerKind::kFtrl && c.lr <= 0) return "FTRL needs a positive lr";
  if (c.lr_power > 0) return "lr_power must not be positive";
  return nullptr;
}

size_t state_elements(const OptimizerConfig& config, size_t numel, size_t row_width) {
  switch (config.kind) {
    case OptimizerKind::kSgd:
      return config.momentum != 0 ? numel : 0;
    case OptimizerKind::kAdagrad:
      return numel;
    case OptimizerKind::kRowWiseAdagrad:
      return row_width == 0 ? 0 : numel / row_width;
    case OptimizerKind::kAdam:
    case OptimizerKind::kSparseAdam:
    case OptimizerKind::kAdamW:
    case OptimizerKind::kFtrl:
      return 2 * numel;
    case OptimizerKind::kRmsprop:
      return config.momentum != 0 ? 2 * numel : numel;
  }
  return 0;
}

template <typename T>
void init_state(const OptimizerConfig& config, T* state, size_t numel, size_t row_width) {
  const size_t size = state_elements(config, numel, row_width);
  const T initial = static_cast<T>(config.initial_accumulator);
  if (is_adagrad_family(config.kind)) {
    std::fill(state, state + size, initial);
    return;
  }
  std::fill(state, state + size, T(0));
  if (config.kind == OptimizerKind::kFtrl) std::fill(state + numel, state + size, initial);
}

template <typename T>
StepScalars<T> make_step(const OptimizerConfig& config, int64_t step_number) {
  const double step = static_cast<double>(step_number);
  const bool rmsprop = config.kind == OptimizerKind::kRmsprop;
  const double square_decay = rmsprop ? config.alpha : config.beta2;
  StepScalars<T> s{};
  s.kind = config.kind;
  s.nesterov = config.nesterov();
  s.has_momentum = config.momentum != 0;
  s.has_weight_decay = config.weight_decay != 0;
  s.has_l1_decay = config.l1 != 0 && config.kind != OptimizerKind::kFtrl;
  s.first_update = step_number == 1;
  s.power_is_half = config.lr_power == -0.5;
  s.negative_lr = static_cast<T>(-step_size(config, step));
  s.lr = static_cast<T>(config.lr);
  s.momentum = static_cast<T>(config.momentum);
  s.one_minus_dampening = static_cast<T>(1.0 - config.dampening);
  s.weight_decay = static_cast<T>(config.weight_decay);
  s.decay_factor = static_cast<T>(1.0 - config.lr * config.weight_decay);
  s.beta2 = static_cast<T>(square_decay);
  s.one_minus_beta1 = static_cast<T>(1.0 - config.beta1);
  s.one_minus_beta2 = static_cast<T>(1.0 - square_decay);
  s.bias_correction2_sqrt = static_cast<T>(std::sqrt(1.0 - std::pow(config.beta2, step)));
  s.eps = static_cast<T>(config.eps);
  s.l1 = static_cast<T>(config.l1);
  s.l2 = static_cast<T>(config.l2);
  s.power = static_cast<T>(-config.lr_power);
  return s;
}

template <typename T>
void update(const StepScalars<T>& scalars, T* weight, T* state, const T* grad, size_t numel,
            size_t row_width) {
  if (numel == 0) return;
  const auto kernel = typed_kernels<T>().update[static_cast<size_t>(scalars.kind)];
  if (scalars.kind != OptimizerKind::kRowWiseAdagrad) {
    kernel(scalars, weight, state, grad, numel);
    return;
  }
  if (row_width == 0 || numel % row_width != 0) {
    throw std::invalid_argument("update: row_width must divide the number of elements");
  }
  for (size_t begin = 0, row = 0; begin < numel; begin += row_width, ++row) {
    kernel(scalars, weight + begin, state + row, grad + begin, row_width);
  }
}

template <typename T>
void update_rows(const StepScalars<T>& scalars, T* const* weights, T* const* states,
                 const T* const* grads, size_t rows, size_t dim) {
  if (dim == 0) return;
  typed_kernels<T>().update_rows[static_cast<size_t>(scalars.kind)](scalars, weights, states, grads,
                                                                    rows, dim);
}

bool step_dependent(const OptimizerConfig& config) {
  if (is_adam_family(config.kind)) return true;
  if (is_adagrad_family(config.kind)) return config.lr_decay != 0;
  return config.kind == OptimizerKind::kSgd && config.momentum != 0;
}

bool counts_per_row(const OptimizerConfig& config) {
  if (config.weight_decay != 0.0) return true;
  switch (config.kind) {
    case OptimizerKind::kSgd:
      return config.momentum != 0.0;
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kRowWiseAdagrad:
    case OptimizerKind::kSparseAdam:
      return false;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
    case OptimizerKind::kRmsprop:
    case OptimizerKind::kFtrl:
      return true;
  }
  return true;
}

template void init_state(const OptimizerConfig&, float*, size_t, size_t);
template void init_state(const OptimizerConfig&, double*, size_t, size_t);
template StepScalars<float> make_step(const OptimizerConfig&, int64_t);
template StepScalars<double> make_step(const OptimizerConfig&, int64_t);
template void update(const StepScalars<float>&, float*, float*, const float*, size_t, size_t);
template void update(const StepScalars<double>&, double*, double*, const double*, size_t, size_t);
template void update_rows(const StepScalars<float>&, float* const*, float* const*,
                          const float* const*, size_t, size_t);
template void update_rows(const StepScalars<double>&, double* const*, double* const*,
                          const double* const*, size_t, size_t);

}  // namespace cpudist::kernels
