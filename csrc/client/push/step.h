// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One step of a trainer as a push takes it. All memory is the caller's, for the time of the call.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/optimizers.h"

namespace cpudist::client {

struct ParameterGradient {  // one dense parameter with a gradient
  uint32_t parameter = 0;
  const void* gradient = nullptr;  // contiguous, the parameter's dtype
};
struct TableGradient {  // the COO gradient of one table, duplicates allowed
  uint32_t table = 0;
  const int64_t* keys = nullptr;
  uint64_t count = 0;
  const float* rows = nullptr;  // [count, dim], contiguous
};
struct StepPush {
  double weight = 1.0;
  uint64_t samples = 0;
  bool by_samples = false;
  double clip_value = 0.0;
  double clip_norm = 0.0;
  bool clip_each = false;  // every tensor by its own norm
  std::vector<kernels::OptimizerConfig> configs;
  std::vector<ParameterGradient> parameters;
  std::vector<TableGradient> tables;
  // Base of every dense parameter, in order: blocks that only other trainers had a gradient for are
  // written as well.
  std::vector<void*> weights;
};

}  // namespace cpudist::client
