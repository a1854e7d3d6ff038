// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Ops over all tables of a step at once: a call for each table would hold Python's lock as often.

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <vector>

#include "kernels/dedupe.h"
#include "kernels/gather_scatter.h"
#include "kernels/hash.h"
#include "kernels/partition.h"
#include "ops/checks.h"
#include "ops/ops.h"
#include "ops/row_update.h"

namespace cpudist::ops {
namespace {

// Of the calling thread, as large as the largest table of a step seen, and freed with the thread.
struct TableScratch {
  kernels::KeyDeduper deduper;
  kernels::KeyPartitioner partitioner;
  std::vector<int64_t> keys;
  std::vector<int64_t> numbers;
  std::vector<uint32_t> inverse;
  std::vector<uint32_t> order;
  std::vector<uint32_t> offsets;
  std::vector<std::byte> rows;  // of either type: new memory is aligned for both
  std::vector<std::byte> negated;
  std::vector<std::byte> weights;
  std::vector<std::byte> states;
};

TableScratch& table_scratch() {
  static thread_local TableScratch memory;
  return memory;
}

template <typename T>
T* typed_room(std::vector<std::byte>& memory, size_t elements) {
  const size_t bytes = elements * sizeof(T);
  if (memory.size() < bytes) memory.resize(bytes);
  return reinterpret_cast<T*>(memory.data());
}

template <typename T>
T* room(std::vector<T>& memory, size_t elements) {
  if (memory.size() < elements) memory.resize(elements);
  return memory.data();
}

// The rows that one replica has of a table: keys int64 [n] and rows [n, dim] of a step.
struct Piece {
  Tensor keys;
  Tensor rows;

  size_t size() const { return static_cast<size_t>(keys.numel()); }
  size_t dim() const { return static_cast<size_t>(rows.size(1)); }
  size_t stride() const { return static_cast<size_t>(rows.stride(0)); }
};

// keys int64 [n] or, as torch has them in a sparse gradient, [1, n].
Piece checked_piece(const Tensor& keys, const Tensor& rows, const char* op) {
  require_cpu(keys, op, "keys");
  require_dtype(keys, ScalarType::Long, "int64", op, "keys");
  const bool vector = keys.dim() == 1 || (keys.dim() == 2 && keys.size(0) == 1);
  require(vector, op, ": keys must have shape [n] or [1, n], got ", keys.dim(), " dimensions");
  require_real(rows, op, "rows");
  require_dim(rows, 2, op, "rows");
  require_size(rows.size(0), keys.numel(), op, "rows.size(0)");
  const bool usable = (rows.size(1) <= 1 || rows.stride(1) == 1) && rows.stride(0) >= 0;
  return {torch::stable::contiguous(keys), usable ? rows : torch::stable::contiguous(rows)};
}

using Pieces = std::vector<Piece>;

// By table its pieces; all of one table have one type and width.
std::vector<Pieces> checked_pieces(const std::vector<Tensor>& keys, const std::vector<Tensor>& rows,
                                   const std::vector<int64_t>& pieces, const char* op) {
  require_size(static_cast<int64_t>(rows.size()), static_cast<int64_t>(keys.size()), op,
               "len(rows)");
  for (const int64_t count : pieces) require(count >= 1, op, ": pieces must be 1 or more each");
  const int64_t sum = std::accumulate(pieces.begin(), pieces.end(), int64_t{0});
  require_size(sum, static_cast<int64_t>(keys.size()), op, "sum(pieces)");
  std::vector<Pieces> tables(pieces.size());
  size_t at = 0;
  for (size_t table = 0; table < pieces.size(); ++table) {
    for (int64_t i = 0; i < pieces[table]; ++i, ++at) {
      tables[table].push_back(checked_piece(keys[at], rows[at], op));
      const Piece& first = tables[table].front();
      const Piece& last = tables[table].back();
      require_size(last.rows.size(1), first.rows.size(1), op, "rows.size(1)");
      require(last.rows.scalar_type() == first.rows.scalar_type(), op,
              ": rows of one table must have one dtype");
    }
  }
  return tables;
}

// Which keys are an owner's: all, or those of every parts-th bucket.
struct Share {
  size_t part = 0;
  size_t parts = 1;
};

// Copies the keys and rows of a piece that are in a share behind what is there already.
template <typename T>
size_t append_share(const Piece& piece, Share share, size_t filled, TableScratch& memory, T* rows) {
  const size_t n = piece.size();
  const int64_t* keys = data<int64_t>(piece.keys);
  const size_t row_bytes = piece.dim() * sizeof(T);
  const size_t stride_bytes = piece.stride() * sizeof(T);
  uint16_t owners[kernels::kBucketCount];
  for (size_t b = 0; b < kernels::kBucketCount; ++b) {
    owners[b] = static_cast<uint16_t>(b % share.parts);
  }
  uint32_t* order = room(memory.order, n);
  uint32_t* offsets = room(memory.offsets, share.parts + 1);
  memory.partitioner.run(keys, n, 0, owners, share.parts, order, offsets);
  const uint32_t* mine = order + offsets[share.part];
  const size_t count = offsets[share.part + 1] - offsets[share.part];
  for (size_t i = 0; i < count; ++i) memory.keys[filled + i] = keys[mine[i]];
  kernels::gather_rows(piece.rows.const_data_ptr(), stride_bytes, mine, count, row_bytes,
                       rows + filled * piece.dim(), row_bytes);
  return count;
}

template <typename T>
size_t append_all(const Piece& piece, size_t filled, TableScratch& memory, T* rows) {
  const size_t n = piece.size();
  const size_t dim = piece.dim();
  std::copy_n(data<int64_t>(piece.keys), n, memory.keys.data() + filled);
  const T* from = data<T>(piece.rows);
  for (size_t i = 0; i < n; ++i) {
    std::copy_n(from + i * piece.stride(), dim, rows + (filled + i) * dim);
  }
  return n;
}

// A table's distinct keys in the order of their first occurrence, and the sums of their rows.
struct Summed {
  Tensor keys;
  Tensor sums;
};

template <typename T>
Summed sum_keys(const int64_t* keys, const T* rows, size_t stride, size_t n, const Piece& like,
                TableScratch& memory) {
  const int64_t size = static_cast<int64_t>(n);
  Tensor unique = new_tensor(like.keys, {size}, ScalarType::Long);
  uint32_t* inverse = room(memory.inverse, n);
  const size_t count = memory.deduper.run(keys, n, mutable_data<int64_t>(unique), inverse);
  const int64_t found = static_cast<int64_t>(count);
  Tensor sums = new_tensor(like.rows, {found, like.rows.size(1)}, like.rows.scalar_type());
  kernels::segment_sum(rows, stride, n, like.dim(), inverse, mutable_data<T>(sums));
  return {torch::stable::narrow(unique, 0, 0, found), sums};
}

template <typename T>
Summed sum_pieces(const Pieces& pieces, Share share, TableScratch& memory) {
  const Piece& first = pieces.front();
  if (pieces.size() == 1 && share.parts == 1) {
    return sum_keys<T>(data<int64_t>(first.keys), data<T>(first.rows), first.stride(), first.size(),
                       first, memory);
  }
  size_t n = 0;
  for (const Piece& piece : pieces) n += piece.size();
  room(memory.keys, n);
  T* rows = typed_room<T>(memory.rows, n * first.dim());
  size_t filled = 0;
  for (const Piece& piece : pieces) {
    filled += share.parts == 1 ? append_all(piece, filled, memory, rows)
                               : append_share(piece, share, filled, memory, rows);
  }
  return sum_keys<T>(memory.keys.data(), rows, first.dim(), filled, first, memory);
}

Summed sum_table(const Pieces& pieces, Share share, TableScratch& memory) {
  const bool single = pieces.front().rows.scalar_type() == ScalarType::Float;
  return single ? sum_pieces<float>(pieces, share, memory)
                : sum_pieces<double>(pieces, share, memory);
}

// One table of a step: what its rows are updated by, where they and their state are.
struct TableStep {
  kernels::OptimizerConfig config;
  Tensor weight;
  std::vector<Tensor> states;  // each [rows, ...], the parts of the optimizer's state in order
  int64_t step;
  bool ascend;

  size_t rows() const { return static_cast<size_t>(weight.size(0)); }
  size_t dim() const { return static_cast<size_t>(weight.size(1)); }
  size_t width(const Tensor& state) const {
    return rows() == 0 ? 0 : static_cast<size_t>(state.numel()) / rows();
  }
};

void check_table_step(const TableStep& table, const Pieces& pieces, const char* op) {
  const Tensor& weight = table.weight;
  require_real(weight, op, "weight");
  require_dim(weight, 2, op, "weight");
  require_mutable(weight, op, "weight");
  require(table.step >= 1, op, ": steps must be at least 1, got ", table.step);
  size_t width = 0;
  for (const Tensor& state : table.states) {
    require_cpu(state, op, "state");
    require(state.scalar_type() == weight.scalar_type(), op,
            ": state must have the dtype of weight");
    require_mutable(state, op, "state");
    width += table.width(state);
    require_size(state.numel(), static_cast<int64_t>(table.width(state) * table.rows()), op,
                 "state.numel()");
  }
  if (table.rows() > 0) {
    const size_t expected = kernels::state_elements(table.config, table.dim(), table.dim());
    require_size(static_cast<int64_t>(width), static_cast<int64_t>(expected), op,
                 "state elements of a row");
  }
  for (const Piece& piece : pieces) {
    require(piece.rows.scalar_type() == weight.scalar_type(), op,
            ": rows must have the dtype of weight");
    require_size(piece.rows.size(1), weight.size(1), op, "rows.size(1)");
    const int64_t* keys = data<int64_t>(piece.keys);
    const size_t bad = kernels::find_out_of_range(keys, piece.size(), weight.size(0));
    if (bad < piece.size()) {
      require(false, op, ": keys[", bad, "] must be in [0, ", weight.size(0), "), got ", keys[bad]);
    }
  }
}

// The kernels have the state of a row in one piece: rows and state are copied out and back.
template <typename T>
void step_joined(const TableStep& table, const int64_t* keys, const T* grads, size_t n,
                 TableScratch& memory) {
  const size_t dim = table.dim();
  const size_t width = kernels::state_elements(table.config, dim, dim);
  T* weights = typed_room<T>(memory.weights, n * dim);
  T* states = typed_room<T>(memory.states, n * width);
  int64_t* numbers = room(memory.numbers, n);
  std::iota(numbers, numbers + n, int64_t{0});
  const size_t row_bytes = dim * sizeof(T);
  kernels::gather_rows(table.weight.const_data_ptr(), row_bytes, keys, n, row_bytes, weights,
                       row_bytes);
  size_t at = 0;
  for (const Tensor& state : table.states) {
    const size_t bytes = table.width(state) * sizeof(T);
    kernels::gather_rows(state.const_data_ptr(), bytes, keys, n, bytes, states + at,
                         width * sizeof(T));
    at += table.width(state);
  }
  run_rows(RowUpdate<T>{table.config, weights, states, nullptr, numbers, grads, n, dim, width,
                        table.step});
  kernels::scatter_rows(table.weight.mutable_data_ptr(), row_bytes, keys, n, row_bytes, weights,
                        row_bytes);
  at = 0;
  for (const Tensor& state : table.states) {
    const size_t bytes = table.width(state) * sizeof(T);
    kernels::scatter_rows(state.mutable_data_ptr(), bytes, keys, n, bytes, states + at,
                          width * sizeof(T));
    at += table.width(state);
  }
}

template <typename T>
void step_summed(const TableStep& table, const Summed& summed, TableScratch& memory) {
  const size_t n = static_cast<size_t>(summed.keys.numel());
  if (n == 0) return;
  const int64_t* keys = data<int64_t>(summed.keys);
  const T* grads = data<T>(summed.sums);
  if (table.ascend) {
    const size_t elements = n * table.dim();
    T* negated = typed_room<T>(memory.negated, elements);
    std::transform(grads, grads + elements, negated, [](T value) { return -value; });
    grads = negated;
  }
  if (table.states.size() > 1) {
    step_joined<T>(table, keys, grads, n, memory);
    return;
  }
  const bool stateless = table.states.empty();
  run_rows(RowUpdate<T>{table.config, mutable_data<T>(table.weight),
                        stateless ? nullptr : mutable_data<T>(table.states[0]), nullptr, keys,
                        grads, n, table.dim(), stateless ? 0 : table.width(table.states[0]),
                        table.step});
}

// The part of a table's keys that an owner has; none if it has no part.
std::optional<Share> share_of(const Pieces& pieces, size_t first, size_t owner, size_t owners,
                              size_t deal_from) {
  size_t n = 0;
  for (const Piece& piece : pieces) n += piece.size();
  if (n < deal_from || owners == 1) {
    if (owner != first) return std::nullopt;
    return Share{0, 1};
  }
  // The first owner has the first part, the others follow in their order.
  const size_t part = owner == first ? 0 : owner + (owner < first ? 1 : 0);
  return Share{part, owners};
}

std::vector<TableStep> table_steps(const std::vector<Tensor>& weights,
                                   const std::vector<Tensor>& states,
                                   const std::vector<int64_t>& facts,
                                   const std::vector<double>& hyper, const char* op) {
  const size_t count = weights.size();
  constexpr size_t kHyper = kernels::kOptimizerHyperCount;
  require_size(static_cast<int64_t>(facts.size()), static_cast<int64_t>(count * kTableFacts), op,
               "len(facts)");
  require_size(static_cast<int64_t>(hyper.size()), static_cast<int64_t>(count * kHyper), op,
               "len(hyper)");
  std::vector<TableStep> steps;
  size_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t* fact = facts.data() + i * kTableFacts;
    const auto from = hyper.begin() + static_cast<std::ptrdiff_t>(i * kHyper);
    const std::vector<double> values(from, from + static_cast<std::ptrdiff_t>(kHyper));
    require(fact[3] >= 0 && at + static_cast<size_t>(fact[3]) <= states.size(), op,
            ": there are fewer states than facts say");
    const size_t parts = static_cast<size_t>(fact[3]);
    const auto begin = states.begin() + static_cast<std::ptrdiff_t>(at);
    at += parts;
    steps.push_back({read_config(fact[0], fact[1], values, op), weights[i],
                     std::vector<Tensor>(begin, begin + static_cast<std::ptrdiff_t>(parts)),
                     fact[2], fact[4] != 0});
  }
  require_size(static_cast<int64_t>(at), static_cast<int64_t>(states.size()), op, "len(states)");
  return steps;
}

}  // namespace

std::vector<Tensor> sum_table_rows(std::vector<Tensor> keys, std::vector<Tensor> rows,
                                   std::vector<int64_t> pieces) {
  TableScratch& memory = table_scratch();
  std::vector<Tensor> found;
  for (const Pieces& table : checked_pieces(keys, rows, pieces, "sum_table_rows")) {
    const Summed summed = sum_table(table, Share{}, memory);
    found.push_back(summed.keys);
    found.push_back(summed.sums);
  }
  return found;
}

std::vector<Tensor> step_table_rows(std::vector<Tensor> keys, std::vector<Tensor> rows,
                                    std::vector<int64_t> pieces, std::vector<Tensor> weights,
                                    std::vector<Tensor> states, std::vector<int64_t> facts,
                                    std::vector<double> hyper, int64_t owner, int64_t owners,
                                    int64_t deal_from) {
  constexpr const char* kOp = "step_table_rows";
  const std::vector<Pieces> tables = checked_pieces(keys, rows, pieces, kOp);
  require_size(static_cast<int64_t>(weights.size()), static_cast<int64_t>(tables.size()), kOp,
               "len(weights)");
  require(owners >= 1 && owners <= 65535, kOp, ": owners must be in [1, 65535], got ", owners);
  require(owner >= 0 && owner < owners, kOp, ": owner must be in [0, ", owners, "), got ", owner);
  const std::vector<TableStep> steps = table_steps(weights, states, facts, hyper, kOp);
  for (size_t i = 0; i < steps.size(); ++i) {
    check_table_step(steps[i], tables[i], kOp);
    const int64_t first = facts[i * kTableFacts + 5];
    require(first >= 0 && first < owners, kOp, ": first owner must be in [0, ", owners, "), got ",
            first);
  }
  TableScratch& memory = table_scratch();
  std::vector<Tensor> found;
  for (size_t i = 0; i < steps.size(); ++i) {
    const TableStep& table = steps[i];
    const Piece& like = tables[i].front();
    const auto share = share_of(tables[i], static_cast<size_t>(facts[i * kTableFacts + 5]),
                                static_cast<size_t>(owner), static_cast<size_t>(owners),
                                static_cast<size_t>(std::max<int64_t>(deal_from, 0)));
    if (!share) {
      found.push_back(new_tensor(like.keys, {0}, ScalarType::Long));
      found.push_back(new_tensor(like.rows, {0, like.rows.size(1)}, like.rows.scalar_type()));
      continue;
    }
    const Summed summed = sum_table(tables[i], *share, memory);
    if (table.weight.scalar_type() == ScalarType::Float) {
      step_summed<float>(table, summed, memory);
    } else {
      step_summed<double>(table, summed, memory);
    }
    found.push_back(summed.keys);
    found.push_back(summed.sums);
  }
  return found;
}

}  // namespace cpudist::ops
