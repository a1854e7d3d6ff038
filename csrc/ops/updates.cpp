// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Fused optimizer updates of table rows and dense parameters.

#include <iterator>

#include "kernels/gather_scatter.h"
#include "kernels/optimizers.h"
#include "ops/checks.h"
#include "ops/ops.h"
#include "ops/row_update.h"

namespace cpudist::ops {

using kernels::OptimizerConfig;

OptimizerConfig read_config(int64_t kind, int64_t flags, const std::vector<double>& hyper,
                            const char* op) {
  require(kind >= 0 && kind < static_cast<int64_t>(kernels::kOptimizerKindCount), op,
          ": kind must be in [0, ", kernels::kOptimizerKindCount, "), got ", kind);
  require(flags >= 0 && flags <= static_cast<int64_t>(kernels::kOptimizerKnownFlags), op,
          ": flags must be in [0, ", kernels::kOptimizerKnownFlags, "], got ", flags);
  require(hyper.size() == kernels::kOptimizerHyperCount, op, ": hyper must have ",
          kernels::kOptimizerHyperCount, " values, got ", hyper.size());
  OptimizerConfig config;
  config.kind = static_cast<kernels::OptimizerKind>(kind);
  config.flags = static_cast<uint32_t>(flags);
  double* const fields[] = {&config.lr,        &config.momentum,
                            &config.dampening, &config.weight_decay,
                            &config.beta1,     &config.beta2,
                            &config.eps,       &config.alpha,
                            &config.lr_decay,  &config.initial_accumulator,
                            &config.l1,        &config.l2,
                            &config.lr_power};
  static_assert(std::size(fields) == kernels::kOptimizerHyperCount);
  for (size_t i = 0; i < std::size(fields); ++i) *fields[i] = hyper[i];
  const char* error = kernels::find_config_error(config);
  if (error != nullptr) require(false, op, ": ", error);
  return config;
}

namespace {

template <typename T>
void run_dense(const OptimizerConfig& config, const Tensor& weight, const Tensor& state,
               const Tensor& grad, int64_t row_width, int64_t step) {
  const auto scalars = kernels::make_step<T>(config, step);
  kernels::update(scalars, mutable_data<T>(weight), mutable_data<T>(state), data<T>(grad),
                  static_cast<size_t>(weight.numel()), static_cast<size_t>(row_width));
}

void require_like(const Tensor& tensor, const Tensor& weight, const char* op, const char* name) {
  require_cpu(tensor, op, name);
  require(tensor.scalar_type() == weight.scalar_type(), op, ": ", name,
          " must have the dtype of weight, got dtype codes ",
          static_cast<int>(tensor.scalar_type()), " and ", static_cast<int>(weight.scalar_type()));
}

void check_rows(const Tensor& weight, const Tensor& state, const std::optional<Tensor>& counts,
                const Tensor& keys, const Tensor& grads, int64_t step) {
  constexpr const char* kOp = "update_rows";
  require_real(weight, kOp, "weight");
  require_dim(weight, 2, kOp, "weight");
  require_mutable(weight, kOp, "weight");
  require_like(state, weight, kOp, "state");
  require_dim(state, 2, kOp, "state");
  require_mutable(state, kOp, "state");
  require_size(state.size(0), weight.size(0), kOp, "state.size(0)");
  require_keys(keys, kOp, "keys");
  require_like(grads, weight, kOp, "grads");
  require_dim(grads, 2, kOp, "grads");
  require_size(grads.size(0), keys.numel(), kOp, "grads.size(0)");
  require_size(grads.size(1), weight.size(1), kOp, "grads.size(1)");
  if (!counts.has_value()) {
    require(step >= 1, kOp, ": step must be at least 1 without counts, got ", step);
    return;
  }
  require_keys(*counts, kOp, "counts");
  require_mutable(*counts, kOp, "counts");
  require_size(counts->numel(), weight.size(0), kOp, "counts.numel()");
  require(step == 0, kOp, ": step must be 0 with counts, got ", step);
}

template <typename T>
void dispatch_rows(const OptimizerConfig& config, const Tensor& weight, const Tensor& state,
                   int64_t* counts, const Tensor& keys, const Tensor& grads, int64_t step) {
  // Counted rows of an optimizer that does not look at the step number share any one.
  run_rows(RowUpdate<T>{config, mutable_data<T>(weight), mutable_data<T>(state), counts,
                        data<int64_t>(keys), data<T>(grads), static_cast<size_t>(keys.numel()),
                        static_cast<size_t>(weight.size(1)), static_cast<size_t>(state.size(1)),
                        counts == nullptr ? step : 1});
}

}  // namespace

void update_rows(Tensor weight, Tensor state, std::optional<Tensor> counts, const Tensor& keys_in,
                 const Tensor& grads_in, int64_t kind, int64_t flags, std::vector<double> hyper,
                 int64_t step) {
  constexpr const char* kOp = "update_rows";
  const OptimizerConfig config = read_config(kind, flags, hyper, kOp);
  check_rows(weight, state, counts, keys_in, grads_in, step);
  const size_t dim = static_cast<size_t>(weight.size(1));
  require_size(state.size(1), static_cast<int64_t>(kernels::state_elements(config, dim, dim)), kOp,
               "state.size(1)");
  const Tensor keys = torch::stable::contiguous(keys_in);
  const Tensor grads = torch::stable::contiguous(grads_in);
  const size_t n = static_cast<size_t>(keys.numel());
  const size_t bad = kernels::find_out_of_range(data<int64_t>(keys), n, weight.size(0));
  if (bad < n) {
    require(false, kOp, ": keys[", bad, "] must be in [0, ", weight.size(0), "), got ",
            data<int64_t>(keys)[bad]);
  }
  int64_t* count = counts.has_value() ? mutable_data<int64_t>(*counts) : nullptr;
  if (weight.scalar_type() == ScalarType::Float) {
    dispatch_rows<float>(config, weight, state, count, keys, grads, step);
  } else {
    dispatch_rows<double>(config, weight, state, count, keys, grads, step);
  }
}

void update_dense(Tensor weight, Tensor state, const Tensor& grad_in, int64_t row_width,
                  int64_t kind, int64_t flags, std::vector<double> hyper, int64_t step) {
  constexpr const char* kOp = "update_dense";
  const OptimizerConfig config = read_config(kind, flags, hyper, kOp);
  require_real(weight, kOp, "weight");
  require_mutable(weight, kOp, "weight");
  require_like(state, weight, kOp, "state");
  require_mutable(state, kOp, "state");
  require_like(grad_in, weight, kOp, "grad");
  require_size(grad_in.numel(), weight.numel(), kOp, "grad.numel()");
  require(row_width >= 1 && weight.numel() % row_width == 0, kOp,
          ": row_width must divide weight.numel() = ", weight.numel(), ", got ", row_width);
  const size_t states = kernels::state_elements(config, static_cast<size_t>(weight.numel()),
                                                static_cast<size_t>(row_width));
  require_size(state.numel(), static_cast<int64_t>(states), kOp, "state.numel()");
  require(step >= 1, kOp, ": step must be at least 1, got ", step);
  const Tensor grad = torch::stable::contiguous(grad_in);
  if (weight.scalar_type() == ScalarType::Float) {
    run_dense<float>(config, weight, state, grad, row_width, step);
  } else {
    run_dense<double>(config, weight, state, grad, row_width, step);
  }
}

}  // namespace cpudist::ops
