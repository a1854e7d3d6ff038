// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Ops that copy rows, and block slicing.

#include "kernels/gather_scatter.h"
#include "kernels/slicing.h"
#include "ops/checks.h"
#include "ops/ops.h"

namespace cpudist::ops {
namespace {

// Bytes of copying below which a second thread costs more than it saves.
constexpr int64_t kGrainBytes = 128 * 1024;

void require_index(const Tensor& index, int64_t rows, const char* op) {
  const size_t n = static_cast<size_t>(index.numel());
  const size_t bad = kernels::find_out_of_range(data<int64_t>(index), n, rows);
  if (bad < n) {
    require(false, op, ": index[", bad, "] must be in [0, ", rows, "), got ",
            data<int64_t>(index)[bad]);
  }
}

void require_contiguous_rows(const Tensor& tensor, const char* op, const char* name) {
  require(tensor.size(1) <= 1 || tensor.stride(1) == 1, op, ": rows of ", name,
          " must be contiguous, got stride ", tensor.stride(1));
}

int64_t row_grain(size_t row_bytes) {
  return kGrainBytes / static_cast<int64_t>(row_bytes == 0 ? 1 : row_bytes) + 1;
}

}  // namespace

Tensor gather_rows(const Tensor& source, const Tensor& index_in) {
  constexpr const char* kOp = "gather_rows";
  require_cpu(source, kOp, "source");
  require_dim(source, 2, kOp, "source");
  require_contiguous_rows(source, kOp, "source");
  require_keys(index_in, kOp, "index");
  const Tensor index = torch::stable::contiguous(index_in);
  require_index(index, source.size(0), kOp);
  Tensor out = new_tensor(source, {index.numel(), source.size(1)}, source.scalar_type());
  const size_t element = source.element_size();
  const size_t row_bytes = static_cast<size_t>(source.size(1)) * element;
  const size_t stride = static_cast<size_t>(source.stride(0)) * element;
  const int64_t* at = data<int64_t>(index);
  const void* from = source.const_data_ptr();
  char* to = mutable_data<char>(out);
  torch::stable::parallel_for(
      0, index.numel(), row_grain(row_bytes), [&](int64_t begin, int64_t end) {
        kernels::gather_rows(from, stride, at + begin, static_cast<size_t>(end - begin), row_bytes,
                             to + static_cast<size_t>(begin) * row_bytes, row_bytes);
      });
  return out;
}

// One thread: with equal indices in two threads the last row would not be sure to stay.
void scatter_rows(Tensor target, const Tensor& index_in, const Tensor& source_in) {
  constexpr const char* kOp = "scatter_rows";
  require_cpu(target, kOp, "target");
  require_dim(target, 2, kOp, "target");
  require_mutable(target, kOp, "target");
  require_cpu(source_in, kOp, "source");
  require_dim(source_in, 2, kOp, "source");
  require_keys(index_in, kOp, "index");
  require_size(source_in.size(0), index_in.numel(), kOp, "source.size(0)");
  require_size(source_in.size(1), target.size(1), kOp, "source.size(1)");
  require(source_in.scalar_type() == target.scalar_type(), kOp,
          ": source and target must have one dtype, got dtype codes ",
          static_cast<int>(source_in.scalar_type()), " and ",
          static_cast<int>(target.scalar_type()));
  const Tensor index = torch::stable::contiguous(index_in);
  const Tensor source = torch::stable::contiguous(source_in);
  require_index(index, target.size(0), kOp);
  const size_t row_bytes = static_cast<size_t>(target.size(1)) * target.element_size();
  kernels::scatter_rows(target.mutable_data_ptr(), row_bytes, data<int64_t>(index),
                        static_cast<size_t>(index.numel()), row_bytes, source.const_data_ptr(),
                        row_bytes);
}

Tensor slice_parameter(int64_t numel, int64_t row_width, int64_t server_count,
                       int64_t min_block_size, bool slice) {
  const auto blocks =
      kernels::slice_parameter(numel, row_width, server_count, min_block_size, slice);
  const int64_t size[] = {static_cast<int64_t>(blocks.size()), 2};
  Tensor out = torch::stable::empty({size, 2}, ScalarType::Long);
  int64_t* to = mutable_data<int64_t>(out);
  for (const kernels::BlockSpan& block : blocks) {
    *to++ = block.begin;
    *to++ = block.size;
  }
  return out;
}

}  // namespace cpudist::ops
