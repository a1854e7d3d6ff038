// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Ops over keys: dedupe, segment sum, partition.

#include <algorithm>
#include <vector>

#include "kernels/dedupe.h"
#include "kernels/gather_scatter.h"
#include "kernels/hash.h"
#include "kernels/partition.h"
#include "ops/checks.h"
#include "ops/ops.h"

namespace cpudist::ops {
namespace {

// Scratch of the calling thread: a table allocated and zeroed per call would cost more than the
// work. It grows to the largest batch seen and is freed with the thread.
struct Scratch {
  kernels::KeyDeduper deduper;
  kernels::KeyPartitioner partitioner;
  std::vector<uint32_t> inverse;
  std::vector<uint32_t> offsets;
};

Scratch& scratch() {
  static thread_local Scratch memory;
  return memory;
}

size_t run_dedupe(const Tensor& keys, int64_t* unique, Scratch& memory) {
  const size_t n = static_cast<size_t>(keys.numel());
  if (memory.inverse.size() < n) memory.inverse.resize(n);
  if (keys.scalar_type() == ScalarType::Int) {
    return memory.deduper.run(data<int32_t>(keys), n, unique, memory.inverse.data());
  }
  return memory.deduper.run(data<int64_t>(keys), n, unique, memory.inverse.data());
}

Tensor checked_keys(const Tensor& keys, const char* op) {
  require_cpu(keys, op, "keys");
  require_dim(keys, 1, op, "keys");
  const ScalarType dtype = keys.scalar_type();
  require(dtype == ScalarType::Long || dtype == ScalarType::Int, op,
          ": keys must be int32 or int64, got dtype code ", static_cast<int>(dtype));
  return torch::stable::contiguous(keys);
}

// Rows may be strided as long as a row is contiguous (an expanded gradient has stride 0).
Tensor checked_rows(const Tensor& rows, int64_t n, const char* op) {
  require_real(rows, op, "rows");
  require_dim(rows, 2, op, "rows");
  require_size(rows.size(0), n, op, "rows.size(0)");
  const bool usable = rows.size(1) <= 1 || rows.stride(1) == 1;
  return usable && rows.stride(0) >= 0 ? rows : torch::stable::contiguous(rows);
}

template <typename T>
void sum_unique(const Tensor& rows, const uint32_t* inverse, const Tensor& out) {
  kernels::segment_sum(data<T>(rows), static_cast<size_t>(rows.stride(0)),
                       static_cast<size_t>(rows.size(0)), static_cast<size_t>(rows.size(1)),
                       inverse, mutable_data<T>(out));
}

template <typename T>
void sum_any(const Tensor& rows, const Tensor& inverse, const Tensor& out) {
  kernels::segment_sum_any(data<T>(rows), static_cast<size_t>(rows.stride(0)),
                           static_cast<size_t>(rows.size(0)), static_cast<size_t>(rows.size(1)),
                           data<int64_t>(inverse), static_cast<size_t>(out.size(0)),
                           mutable_data<T>(out));
}

}  // namespace

std::tuple<Tensor, Tensor> dedupe_keys(const Tensor& keys_in) {
  const Tensor keys = checked_keys(keys_in, "dedupe_keys");
  const int64_t n = keys.numel();
  Tensor unique = new_tensor(keys, {n}, ScalarType::Long);
  Tensor inverse = new_tensor(keys, {n}, ScalarType::Long);
  Scratch& memory = scratch();
  const size_t count = run_dedupe(keys, mutable_data<int64_t>(unique), memory);
  std::copy_n(memory.inverse.data(), n, mutable_data<int64_t>(inverse));
  Tensor found = torch::stable::narrow(unique, 0, 0, static_cast<int64_t>(count));
  return {found, inverse};
}

Tensor segment_sum(const Tensor& rows_in, const Tensor& inverse_in, int64_t count) {
  constexpr const char* kOp = "segment_sum";
  require_keys(inverse_in, kOp, "inverse");
  require(count >= 0, kOp, ": count must be at least 0, got ", count);
  const Tensor inverse = torch::stable::contiguous(inverse_in);
  const Tensor rows = checked_rows(rows_in, inverse.numel(), kOp);
  const size_t n = static_cast<size_t>(inverse.numel());
  const size_t bad = kernels::find_out_of_range(data<int64_t>(inverse), n, count);
  if (bad < n) {
    require(false, kOp, ": inverse[", bad, "] must be in [0, ", count, "), got ",
            data<int64_t>(inverse)[bad]);
  }
  Tensor out = new_tensor(rows, {count, rows.size(1)}, rows.scalar_type());
  if (rows.scalar_type() == ScalarType::Float) {
    sum_any<float>(rows, inverse, out);
  } else {
    sum_any<double>(rows, inverse, out);
  }
  return out;
}

std::tuple<Tensor, Tensor> dedupe_segment_sum(const Tensor& keys_in, const Tensor& rows_in) {
  constexpr const char* kOp = "dedupe_segment_sum";
  const Tensor keys = checked_keys(keys_in, kOp);
  const Tensor rows = checked_rows(rows_in, keys.numel(), kOp);
  Tensor unique = new_tensor(keys, {keys.numel()}, ScalarType::Long);
  Scratch& memory = scratch();
  const int64_t count =
      static_cast<int64_t>(run_dedupe(keys, mutable_data<int64_t>(unique), memory));
  Tensor sums = new_tensor(rows, {count, rows.size(1)}, rows.scalar_type());
  if (rows.scalar_type() == ScalarType::Float) {
    sum_unique<float>(rows, memory.inverse.data(), sums);
  } else {
    sum_unique<double>(rows, memory.inverse.data(), sums);
  }
  Tensor found = torch::stable::narrow(unique, 0, 0, count);
  return {found, sums};
}

std::tuple<Tensor, Tensor> partition_keys(const Tensor& keys_in, const Tensor& bucket_owner,
                                          int64_t salt, int64_t parts) {
  constexpr const char* kOp = "partition_keys";
  require_keys(keys_in, kOp, "keys");
  require_keys(bucket_owner, kOp, "bucket_owner");
  require_size(bucket_owner.numel(), static_cast<int64_t>(kernels::kBucketCount), kOp,
               "bucket_owner.numel()");
  require(parts >= 1 && parts <= 65535, kOp, ": parts must be in [1, 65535], got ", parts);
  const Tensor keys = torch::stable::contiguous(keys_in);
  const Tensor wide = torch::stable::contiguous(bucket_owner);
  const int64_t* owner = data<int64_t>(wide);
  const size_t bad = kernels::find_out_of_range(owner, kernels::kBucketCount, parts);
  if (bad < kernels::kBucketCount) {
    require(false, kOp, ": bucket_owner[", bad, "] must be in [0, ", parts, "), got ", owner[bad]);
  }
  uint16_t owners[kernels::kBucketCount];
  for (size_t b = 0; b < kernels::kBucketCount; ++b) owners[b] = static_cast<uint16_t>(owner[b]);

  const size_t n = static_cast<size_t>(keys.numel());
  const size_t part_count = static_cast<size_t>(parts);
  Scratch& memory = scratch();
  if (memory.inverse.size() < n) memory.inverse.resize(n);
  if (memory.offsets.size() < part_count + 1) memory.offsets.resize(part_count + 1);
  memory.partitioner.run(data<int64_t>(keys), n, static_cast<uint64_t>(salt), owners, part_count,
                         memory.inverse.data(), memory.offsets.data());
  Tensor order = new_tensor(keys, {keys.numel()}, ScalarType::Long);
  Tensor offsets = new_tensor(keys, {parts + 1}, ScalarType::Long);
  std::copy_n(memory.inverse.data(), n, mutable_data<int64_t>(order));
  std::copy_n(memory.offsets.data(), part_count + 1, mutable_data<int64_t>(offsets));
  return {order, offsets};
}

}  // namespace cpudist::ops
