// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "inference/row_file.h"

#include <cstring>
#include <string>
#include <utility>

#include "kernels/quantize.h"

namespace cpudist::inference {

namespace {

// More rows than any file has; the sizes of its columns fit 64 bits.
constexpr uint64_t kMostRows = uint64_t{1} << 40;
constexpr uint64_t kMostDim = uint64_t{1} << 20;

}  // namespace

RowFile::RowFile(std::shared_ptr<const CheckedBytes> bytes, RowColumns columns, uint64_t rows,
                 uint32_t first_bucket, uint32_t last_bucket, RowDtype dtype, uint64_t dim)
    : bytes_(std::move(bytes)),
      columns_(columns),
      rows_(rows),
      first_bucket_(first_bucket),
      last_bucket_(last_bucket),
      dtype_(dtype),
      dim_(dim),
      row_bytes_(dim * element_bytes(dtype)) {
  const bool scaled = !gone() && dtype == RowDtype::kInt8;
  if (first_bucket > last_bucket || last_bucket > kernels::kBucketCount || dim == 0 ||
      dim > kMostDim || (gone() && whole()) || scaled != (columns.scale != 0) ||
      whole() != (columns.bucket_begin == 0)) {
    throw Error(ErrorCode::kInvalidArgument,
                bytes_->name() + ": no such rows: buckets " + std::to_string(first_bucket) +
                    " to " + std::to_string(last_bucket) + ", dim " + std::to_string(dim));
  }
  if (rows > (whole() ? kMostRows : uint64_t{INT32_MAX})) {
    throw Damage(bytes_->name() + " is damaged: " + std::to_string(rows) + " rows", bytes_->name());
  }
  if (!gone()) {
    check_column(columns.weight, element_bytes(dtype), rows * row_bytes_, "weight");
  }
  if (scaled) check_column(columns.scale, 4, rows * 4, "scale");
  if (whole()) return;
  check_column(columns.keys, 8, rows * 8, "keys");
  const uint64_t buckets = last_bucket - first_bucket;
  check_column(columns.bucket_begin, 4, 4 * (buckets + 1), "bucket_begin");
  begins_.resize(buckets + 1);
  std::memcpy(begins_.data(), bytes_->at(columns.bucket_begin, 4 * (buckets + 1)),
              4 * (buckets + 1));
  bool rising = begins_.front() == 0 && begins_.back() == rows;
  for (uint64_t i = 0; i < buckets; ++i) rising = rising && begins_[i] <= begins_[i + 1];
  if (!rising) {
    throw Damage(bytes_->name() + " is damaged: its buckets do not divide its rows",
                 bytes_->name());
  }
}

void RowFile::check_column(uint64_t begin, uint64_t element, uint64_t size,
                           const char* what) const {
  // What is aligned in the file is so in memory: files are mapped at a page.
  if (begin % element != 0 || begin > bytes_->size() || size > bytes_->size() - begin) {
    throw Damage(bytes_->name() + " is damaged: its column " + what + " of " +
                     std::to_string(size) + " bytes begins at " + std::to_string(begin) + " of " +
                     std::to_string(bytes_->size()),
                 bytes_->name());
  }
}

void RowFile::widen(uint64_t row, const std::byte* values, float* out) const {
  switch (dtype_) {
    case RowDtype::kFloat32:
      std::memcpy(out, values, row_bytes_);
      return;
    case RowDtype::kFloat16:
      kernels::from_half(reinterpret_cast<const uint16_t*>(values), out, dim_);
      return;
    case RowDtype::kBFloat16:
      kernels::from_bfloat16(reinterpret_cast<const uint16_t*>(values), out, dim_);
      return;
    case RowDtype::kInt8: {
      const float unit = scale(row);
      const auto* whole_numbers = reinterpret_cast<const int8_t*>(values);
      for (uint64_t j = 0; j < dim_; ++j) out[j] = unit * static_cast<float>(whole_numbers[j]);
      return;
    }
  }
}

void RowFile::check_all() const { bytes_->at(0, bytes_->size()); }

}  // namespace cpudist::inference
