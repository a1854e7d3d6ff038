// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The optimizers that run on servers and in fused row updates. The order of operations is that of
// torch.optim's single-tensor CPU implementations; formulas stand beside the kernels in
// update_impl.h. Weight and state of a row or block are separate runs of elements.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace cpudist::kernels {

enum class OptimizerKind : uint32_t {
  kSgd = 0,
  kAdagrad = 1,
  kRowWiseAdagrad = 2,
  kAdam = 3,
  kSparseAdam = 4,
  kAdamW = 5,
  kRmsprop = 6,
  kFtrl = 7,
};
constexpr uint32_t kOptimizerKindCount = 8;
const char* optimizer_kind_name(OptimizerKind kind);  // "unknown" beyond the last

constexpr uint32_t kOptimizerNesterov = 1u << 0;
constexpr uint32_t kOptimizerKnownFlags = kOptimizerNesterov;

// Travels in frames as it stands: two u32, then 13 IEEE doubles, little endian, no padding.
// Options an optimizer has no use for are ignored by it and must be zero in a frame.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kSgd;
  uint32_t flags = 0;
  double lr = 0.0;
  double momentum = 0.0;             // SGD, RMSprop
  double dampening = 0.0;            // SGD
  double weight_decay = 0.0;         // L2 added to the gradient; decoupled for AdamW
  double beta1 = 0.0;                // Adam family
  double beta2 = 0.0;                // Adam family
  double eps = 0.0;                  // denominators; the beta of McMahan et al. for FTRL
  double alpha = 0.0;                // RMSprop
  double lr_decay = 0.0;             // Adagrad, RowWiseAdagrad
  double initial_accumulator = 0.0;  // Adagrad, RowWiseAdagrad, FTRL
  double l1 = 0.0;                   // FTRL's; else L1 decay: l1 * sign(w) added to the gradient
  double l2 = 0.0;                   // FTRL
  double lr_power = 0.0;             // FTRL, -0.5 in the paper

  bool nesterov() const { return (flags & kOptimizerNesterov) != 0; }
  friend bool operator==(const OptimizerConfig&, const OptimizerConfig&) = default;
};
constexpr size_t kOptimizerHyperCount = 13;
static_assert(sizeof(OptimizerConfig) == 8 + 8 * kOptimizerHyperCount);
static_assert(std::is_trivially_copyable_v<OptimizerConfig>);

// Null if the configuration can run, else a static message that names the first option that
// is out of range. Use it on every configuration that came over a wire.
const char* find_config_error(const OptimizerConfig& config);

// State elements beside numel weights in rows of row_width (numel for a single table row):
// SGD numel with momentum, else 0; Adagrad numel; RowWiseAdagrad one per row; Adam, SparseAdam,
// AdamW 2 numel (m, then v); RMSprop numel (+ numel with momentum: v, then buffer);
// FTRL 2 numel (z, then n).
size_t state_elements(const OptimizerConfig& config, size_t numel, size_t row_width);

// Fills the state of numel weights as before the first update.
template <typename T>
void init_state(const OptimizerConfig& config, T* state, size_t numel, size_t row_width);

// What one update needs of the configuration and the step number, computed in double as torch
// does and then rounded to T.
template <typename T>
struct StepScalars {
  OptimizerKind kind;
  bool nesterov;
  bool has_momentum;
  bool has_weight_decay;
  bool has_l1_decay;  // never of FTRL, whose l1 is its own
  bool first_update;  // SGD with momentum: the buffer becomes the gradient
  bool power_is_half;
  T negative_lr;  // -lr, -clr or -step_size
  T lr;
  T momentum;
  T one_minus_dampening;
  T weight_decay;
  T decay_factor;  // AdamW: 1 - lr * weight_decay
  T beta2;         // alpha for RMSprop
  T one_minus_beta1;
  T one_minus_beta2;
  T bias_correction2_sqrt;
  T eps;
  T l1;
  T l2;
  T power;  // FTRL: -lr_power
};

// step counts the updates of this block, row or table, this one included: it is at least 1.
template <typename T>
StepScalars<T> make_step(const OptimizerConfig& config, int64_t step);

// Updates numel weights and their state in place from grad (left alone). row_width matters to
// RowWiseAdagrad only, and must divide numel. Buffers must not overlap.
template <typename T>
void update(const StepScalars<T>& scalars, T* weight, T* state, const T* grad, size_t numel,
            size_t row_width);

// Updates `rows` rows of dim weights, row i at weights[i] with state states[i] and gradient
// grads[i]; all rows with the same scalars. states may be null if the optimizer has no state.
// Rows are taken in order; the same row twice is updated twice. Prefetches rows ahead.
template <typename T>
void update_rows(const StepScalars<T>& scalars, T* const* weights, T* const* states,
                 const T* const* grads, size_t rows, size_t dim);

// True when the scalars depend on the step number, so that rows with different counts of
// updates need a make_step each.
bool step_dependent(const OptimizerConfig& config);

// True for optimizers whose step number on a table is the row's own count of updates: those that
// torch refuses on sparse gradients or would run over every row. False: the table's step.
bool counts_per_row(const OptimizerConfig& config);

// Scalars by step number, for rows that count their own updates: most rows of a batch share few
// counts, and the powers of a step cost more than the row. Not thread safe.
template <typename T>
class StepCache {
 public:
  explicit StepCache(const OptimizerConfig& config) : config_(config) {}

  // step as in make_step. The reference is valid until the next call.
  const StepScalars<T>& at(int64_t step) {
    Entry& entry = entries_[static_cast<uint64_t>(step) % entries_.size()];
    if (entry.step != step) entry = {step, make_step<T>(config_, step)};
    return entry.scalars;
  }

 private:
  struct Entry {
    int64_t step = 0;  // no valid step
    StepScalars<T> scalars{};
  };

  OptimizerConfig config_;
  std::array<Entry, 64> entries_{};
};

}  // namespace cpudist::kernels
