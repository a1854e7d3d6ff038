// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The dispatcher ops. n is the number of keys or rows of a batch, dim the elements of a row.
// Read-only arguments may have any strides; mutated ones must be contiguous. Every op checks its
// arguments and throws before it writes: std::runtime_error, which torch raises as RuntimeError
// (slice_parameter: std::invalid_argument, ValueError).

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace cpudist::ops {

using torch::stable::Tensor;

// keys int32 or int64 [n] -> unique int64 [u] in order of first occurrence, inverse int64 [n].
std::tuple<Tensor, Tensor> dedupe_keys(const Tensor& keys);

// rows float32 or float64 [n, dim], inverse int64 [n] below count -> [count, dim]; rows of a
// segment are added in the order of the batch, empty segments are zero.
Tensor segment_sum(const Tensor& rows, const Tensor& inverse, int64_t count);

// Both at once: unique int64 [u] and the sums [u, dim] of the rows of each key.
std::tuple<Tensor, Tensor> dedupe_segment_sum(const Tensor& keys, const Tensor& rows);

// keys int64 [n], bucket_owner int64 [4096] below parts -> order int64 [n] (positions grouped by
// owner, stable), offsets int64 [parts + 1]. salt is the bit pattern of table_salt.
std::tuple<Tensor, Tensor> partition_keys(const Tensor& keys, const Tensor& bucket_owner,
                                          int64_t salt, int64_t parts);

// source [rows, dim] of any dtype with contiguous rows, index int64 [n] -> [n, dim].
Tensor gather_rows(const Tensor& source, const Tensor& index);

// target[index[i]] = source[i] in the order of i; target and source [*, dim] of one dtype.
void scatter_rows(Tensor target, const Tensor& index, const Tensor& source);

// Of several tables at once, each with pieces[i] consecutive entries of keys (int64 [n] or [1, n])
// and rows ([n, dim]): by table the distinct keys int64 [u] and the sums [u, dim], as
// dedupe_segment_sum of the pieces one behind the other.
std::vector<Tensor> sum_table_rows(std::vector<Tensor> keys, std::vector<Tensor> rows,
                                   std::vector<int64_t> pieces);

// The same, and update_rows of each table by its sums. By table: weights[i] [rows, dim], so many
// consecutive states as facts say (each [rows, ...], the parts of a row's state in order), the
// values of facts (kind, flags, step, states, whether it ascends, first owner) and of hyper
// (OptimizerConfig). An owner takes the keys of its buckets, or, of a table with fewer than
// deal_from keys, all if it is the table's first owner; where it has none it gives empty tensors.
// Several threads may be at it at once, each for another owner.
std::vector<Tensor> step_table_rows(std::vector<Tensor> keys, std::vector<Tensor> rows,
                                    std::vector<int64_t> pieces, std::vector<Tensor> weights,
                                    std::vector<Tensor> states, std::vector<int64_t> facts,
                                    std::vector<double> hyper, int64_t owner, int64_t owners,
                                    int64_t deal_from);
constexpr size_t kTableFacts = 6;

// Optimizer update of rows keys (int64 [n], distinct) of weight [rows, dim] and state
// [rows, state elements of a row] from grads [n, dim]. With counts int64 [rows], counts[key] is
// raised first and is the row's step number, and step must be 0; without, step is that of all
// rows. kind, flags and hyper are the fields of kernels::OptimizerConfig in their order.
void update_rows(Tensor weight, Tensor state, std::optional<Tensor> counts, const Tensor& keys,
                 const Tensor& grads, int64_t kind, int64_t flags, std::vector<double> hyper,
                 int64_t step);

// The same for a whole dense parameter or block; state is flat, in the layout of state_elements.
void update_dense(Tensor weight, Tensor state, const Tensor& grad, int64_t row_width, int64_t kind,
                  int64_t flags, std::vector<double> hyper, int64_t step);

// Blocks of a dense parameter: int64 [blocks, 2], begin and size of each in elements.
Tensor slice_parameter(int64_t numel, int64_t row_width, int64_t server_count,
                       int64_t min_block_size, bool slice);

}  // namespace cpudist::ops
