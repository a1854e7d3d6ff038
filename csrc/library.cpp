// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Registration of every dispatcher op: all schemas in one place, implementations in csrc/ops.
// The ops use torch's stable ABI, so that one build serves several torch versions.

#include <torch/csrc/stable/library.h>

#include "ops/ops.h"

// Mutated arguments carry (a!). Ops cannot bump Tensor._version through this ABI and can raise
// RuntimeError only: torch_cpudist/ops.py does the first and raises typed errors before the call.
STABLE_TORCH_LIBRARY(torch_cpudist, m) {
  m.def("dedupe_keys(Tensor keys) -> (Tensor unique, Tensor inverse)");
  m.def("segment_sum(Tensor rows, Tensor inverse, SymInt count) -> Tensor");
  m.def("dedupe_segment_sum(Tensor keys, Tensor rows) -> (Tensor unique, Tensor sums)");
  m.def(
      "partition_keys(Tensor keys, Tensor bucket_owner, int salt, int parts)"
      " -> (Tensor order, Tensor offsets)");
  m.def("gather_rows(Tensor source, Tensor index) -> Tensor");
  m.def("scatter_rows(Tensor(a!) target, Tensor index, Tensor source) -> ()");
  m.def("sum_table_rows(Tensor[] keys, Tensor[] rows, int[] pieces) -> Tensor[]");
  m.def(
      "step_table_rows(Tensor[] keys, Tensor[] rows, int[] pieces, Tensor(a!)[] weights,"
      " Tensor(b!)[] states, int[] facts, float[] hyper, int owner, int owners, int deal_from)"
      " -> Tensor[]");
  m.def(
      "update_rows(Tensor(a!) weight, Tensor(b!) state, Tensor(c!)? counts, Tensor keys,"
      " Tensor grads, int kind, int flags, float[] hyper, int step) -> ()");
  m.def(
      "update_dense(Tensor(a!) weight, Tensor(b!) state, Tensor grad, int row_width, int kind,"
      " int flags, float[] hyper, int step) -> ()");
  m.def(
      "slice_parameter(int numel, int row_width, int server_count, int min_block_size, bool slice)"
      " -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_cpudist, CPU, m) {
  m.impl("dedupe_keys", TORCH_BOX(&cpudist::ops::dedupe_keys));
  m.impl("segment_sum", TORCH_BOX(&cpudist::ops::segment_sum));
  m.impl("dedupe_segment_sum", TORCH_BOX(&cpudist::ops::dedupe_segment_sum));
  m.impl("partition_keys", TORCH_BOX(&cpudist::ops::partition_keys));
  m.impl("gather_rows", TORCH_BOX(&cpudist::ops::gather_rows));
  m.impl("scatter_rows", TORCH_BOX(&cpudist::ops::scatter_rows));
  m.impl("sum_table_rows", TORCH_BOX(&cpudist::ops::sum_table_rows));
  m.impl("step_table_rows", TORCH_BOX(&cpudist::ops::step_table_rows));
  m.impl("update_rows", TORCH_BOX(&cpudist::ops::update_rows));
  m.impl("update_dense", TORCH_BOX(&cpudist::ops::update_dense));
}

// No tensor argument, so no CPU key would ever be looked at.
STABLE_TORCH_LIBRARY_IMPL(torch_cpudist, CompositeExplicitAutograd, m) {
  m.impl("slice_parameter", TORCH_BOX(&cpudist::ops::slice_parameter));
}
