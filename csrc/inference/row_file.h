// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of one table in one file of an export, read where they lie; docs/export.md has the format.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "inference/checked_bytes.h"
#include "kernels/hash.h"

namespace cpudist::inference {

enum class RowDtype : uint32_t { kFloat32, kFloat16, kBFloat16, kInt8 };

constexpr uint64_t element_bytes(RowDtype dtype) {
  return dtype == RowDtype::kFloat32 ? 4 : dtype == RowDtype::kInt8 ? 1 : 2;
}

// Where columns begin in the file; 0: it has none.
struct RowColumns {
  uint64_t keys = 0;          // int64 [rows], by bucket and key; without, the key is the row
  uint64_t weight = 0;        // [rows, dim]; without, these keys are gone
  uint64_t scale = 0;         // float [rows], of int8
  uint64_t bucket_begin = 0;  // int32 [buckets + 1]: first row of each, and `rows`; with keys
};

// Immutable. Thread safety: any number of threads.
class RowFile {
 public:
  // Rows of the buckets from `first_bucket` up to `last_bucket`, which is excluded. Throws Damage
  // where columns are not in the file, or buckets do not divide the rows; Error (kInvalidArgument)
  // for buckets that there are not, and columns that do not belong together.
  RowFile(std::shared_ptr<const CheckedBytes> bytes, RowColumns columns, uint64_t rows,
          uint32_t first_bucket, uint32_t last_bucket, RowDtype dtype, uint64_t dim);

  uint64_t rows() const { return rows_; }
  uint32_t first_bucket() const { return first_bucket_; }
  uint32_t last_bucket() const { return last_bucket_; }
  RowDtype dtype() const { return dtype_; }
  uint64_t dim() const { return dim_; }
  bool whole() const { return columns_.keys == 0; }  // a row for every key
  bool gone() const { return columns_.weight == 0; }
  // Of rows with keys: the first row of a bucket, and behind the last one their number.
  uint32_t begin_of(uint32_t bucket) const { return begins_[bucket - first_bucket_]; }

  // Keys of a run of rows, the last excluded.
  const int64_t* keys(uint64_t begin, uint64_t end) const {
    const auto* at = bytes_->at(columns_.keys + 8 * begin, 8 * (end - begin));
    return reinterpret_cast<const int64_t*>(at);
  }
  const std::byte* row(uint64_t row) const {
    return bytes_->at(columns_.weight + row * row_bytes_, row_bytes_);
  }
  float scale(uint64_t row) const {
    return *reinterpret_cast<const float*>(bytes_->at(columns_.scale + 4 * row, 4));
  }
  // One row as float. `values` is row(row).
  void widen(uint64_t row, const std::byte* values, float* out) const;
  void check_all() const;

 private:
  void check_column(uint64_t begin, uint64_t element, uint64_t size, const char* what) const;

  std::shared_ptr<const CheckedBytes> bytes_;
  RowColumns columns_;
  uint64_t rows_;
  uint32_t first_bucket_;
  uint32_t last_bucket_;
  RowDtype dtype_;
  uint64_t dim_;
  uint64_t row_bytes_;
  std::vector<uint32_t> begins_;
};

}  // namespace cpudist::inference
