// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The update of some rows of one table, for the ops that update tables.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/hash.h"
#include "kernels/optimizers.h"

namespace cpudist::ops {

// Elements below which a second thread costs more than it saves.
constexpr int64_t kGrainElements = 64 * 1024;
constexpr size_t kRowBatch = 256;

// From the fields of OptimizerConfig in their order. Throws for what is out of range, naming op.
kernels::OptimizerConfig read_config(int64_t kind, int64_t flags, const std::vector<double>& hyper,
                                     const char* op);

template <typename T>
struct RowUpdate {
  const kernels::OptimizerConfig& config;
  T* weight;
  T* state;
  int64_t* counts;  // null: all rows are at `step`
  const int64_t* keys;
  const T* grads;
  size_t n;
  size_t dim;
  size_t state_width;
  int64_t step;

  T* state_row(int64_t key) const {
    return state_width == 0 ? nullptr : state + static_cast<size_t>(key) * state_width;
  }
  T* weight_row(int64_t key) const { return weight + static_cast<size_t>(key) * dim; }
};

// Rows that share one set of scalars, in batches of pointers. mine(key) tells whose row it is.
template <typename T, typename Mine>
void update_uniform(const RowUpdate<T>& job, Mine mine) {
  const kernels::StepScalars<T> scalars = kernels::make_step<T>(job.config, job.step);
  T* weights[kRowBatch];
  T* states[kRowBatch];
  const T* grads[kRowBatch];
  size_t size = 0;
  for (size_t i = 0; i < job.n; ++i) {
    const int64_t key = job.keys[i];
    if (mine(key)) {
      if (job.counts != nullptr) ++job.counts[key];
      weights[size] = job.weight_row(key);
      states[size] = job.state_row(key);
      grads[size] = job.grads + i * job.dim;
      ++size;
    }
    if (size == kRowBatch || (i + 1 == job.n && size > 0)) {
      kernels::update_rows(scalars, weights, job.state_width == 0 ? nullptr : states, grads, size,
                           job.dim);
      size = 0;
    }
  }
}

// Rows with a step number each.
template <typename T, typename Mine>
void update_counted(const RowUpdate<T>& job, Mine mine) {
  kernels::StepCache<T> steps(job.config);
  for (size_t i = 0; i < job.n; ++i) {
    const int64_t key = job.keys[i];
    if (!mine(key)) continue;
    kernels::update(steps.at(++job.counts[key]), job.weight_row(key), job.state_row(key),
                    job.grads + i * job.dim, job.dim, job.dim);
  }
}

template <typename T, typename Mine>
void update_part(const RowUpdate<T>& job, Mine mine) {
  if (job.counts != nullptr && kernels::step_dependent(job.config)) {
    update_counted(job, mine);
  } else {
    update_uniform(job, mine);
  }
}

// Every row belongs to one thread, so the result does not depend on their number, not even when a
// key occurs twice.
template <typename T>
void run_rows(const RowUpdate<T>& job) {
  const int64_t wanted = static_cast<int64_t>(job.n * job.dim) / kGrainElements + 1;
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), wanted);
  if (threads <= 1) {
    update_part(job, [](int64_t) { return true; });
    return;
  }
  const uint64_t parts = static_cast<uint64_t>(threads);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const uint64_t own = static_cast<uint64_t>(part);
      update_part(job, [=](int64_t key) {
        return kernels::mix64(static_cast<uint64_t>(key)) % parts == own;
      });
    }
  });
}

}  // namespace cpudist::ops
