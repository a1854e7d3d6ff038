// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/snapshot/rows.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>

#include "kernels/aligned.h"
#include "kernels/hash.h"

namespace cpudist::server {
namespace {

// A column is put together and written so many bytes at a time.
constexpr size_t kPieceBytes = 4u << 20;

}  // namespace

PartRows::PartRows(const table::RecordShape& shape, uint32_t rows_per_slab)
    : shape_(shape),
      records_(static_cast<uint8_t*>(::operator new(kernels::checked_size_bytes(
          size_t{kSlabs} * rows_per_slab, static_cast<size_t>(shape.stride))))),
      bucket_begin_(kernels::kBucketCount + 1) {
  rows_.reserve(size_t{kSlabs} * rows_per_slab);
  sorted_.reserve(size_t{kSlabs} * rows_per_slab);
}

void PartRows::take(uint32_t records) {
  const uint8_t* record = next();
  for (uint32_t i = 0; i < records; ++i, record += shape_.stride) {
    table::RowHeader header;
    std::memcpy(&header, record, sizeof header);
    rows_.push_back({header.key, kernels::bucket_of(header.key, shape_.salt),
                     static_cast<uint32_t>(rows_.size())});
  }
  ++slabs_;
}

void PartRows::sort() {
  std::fill(bucket_begin_.begin(), bucket_begin_.end(), 0);
  for (const Row& row : rows_) ++bucket_begin_[row.bucket + 1];
  for (size_t bucket = 0; bucket < kernels::kBucketCount; ++bucket) {
    bucket_begin_[bucket + 1] += bucket_begin_[bucket];
  }
  sorted_.resize(rows_.size());
  std::vector<int32_t> next(bucket_begin_.begin(), bucket_begin_.end() - 1);
  for (const Row& row : rows_) sorted_[static_cast<size_t>(next[row.bucket]++)] = row;
  for (size_t bucket = 0; bucket < kernels::kBucketCount; ++bucket) {
    std::sort(sorted_.begin() + bucket_begin_[bucket], sorted_.begin() + bucket_begin_[bucket + 1],
              [](const Row& a, const Row& b) { return a.key < b.key; });
  }
}

std::vector<TensorEntry> PartRows::entries() const {
  const uint64_t rows = rows_.size();
  std::vector<TensorEntry> entries = {{"keys", "I64", {rows}},
                                      {"weight", "F32", {rows, shape_.dim}}};
  if (shape_.state_elements > 0) entries.push_back({"state", "F32", {rows, shape_.state_elements}});
  entries.push_back({"count", "U32", {rows}});
  entries.push_back({"last_seen", "U32", {rows}});
  if (shape_.averaged) entries.push_back({"average", "F32", {rows, shape_.dim}});
  entries.push_back({"bucket_begin", "I32", {bucket_begin_.size()}});
  uint64_t end = 0;
  for (TensorEntry& entry : entries) place_tensor(&entry, &end);
  return entries;
}

void PartRows::append_column(OutputFile* file, uint64_t offset, uint64_t size_bytes) {
  const size_t rows_per_piece = std::max<size_t>(kPieceBytes / size_bytes, 1);
  for (size_t begin = 0; begin < sorted_.size(); begin += rows_per_piece) {
    const size_t count = std::min(rows_per_piece, sorted_.size() - begin);
    column_.resize(count * size_bytes);
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(column_.data() + i * size_bytes,
                  records_.get() + sorted_[begin + i].place * shape_.stride + offset, size_bytes);
    }
    file->append(column_.data(), column_.size());
  }
}

void PartRows::write(OutputFile* file) {
  sort();
  const std::string head = tensors_head("torch_cpudist.rows", entries());
  const uint64_t weight = sizeof(table::RowHeader);
  const uint64_t weight_bytes = shape_.dim * sizeof(float);
  const uint64_t state_bytes = shape_.state_elements * sizeof(float);
  file->append(head.data(), head.size());
  append_column(file, offsetof(table::RowHeader, key), sizeof(int64_t));
  append_column(file, weight, weight_bytes);
  if (state_bytes > 0) append_column(file, weight + weight_bytes, state_bytes);
  append_column(file, offsetof(table::RowHeader, count), sizeof(uint32_t));
  append_column(file, offsetof(table::RowHeader, last_seen), sizeof(uint32_t));
  if (shape_.averaged) append_column(file, weight + weight_bytes + state_bytes, weight_bytes);
  file->append(bucket_begin_.data(), bucket_begin_.size() * sizeof(int32_t));
  rows_.clear();
  slabs_ = 0;
}

}  // namespace cpudist::server
