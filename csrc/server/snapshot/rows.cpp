// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/snapshot/rows.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "kernels/hash.h"

namespace cpudist::server {
namespace {

using Row = PartRows::Row;

// Rows are sorted by so many bits of their keys at a time, at most.
constexpr uint32_t kDigitBits = 13;
// Records lie at random places: so many are asked for ahead.
constexpr size_t kAhead = 12;
// Of a record; what follows comes by itself.
constexpr uint64_t kBytesAhead = 512;

// A number of a key: in the order of the keys, which have a sign.
uint64_t order_of(int64_t key) { return static_cast<uint64_t>(key) ^ (uint64_t{1} << 63); }

// Stable, by `digit`, which is below begins.size(). Leaves where each digit ends in `ends`.
template <typename Digit>
void sort_by(const std::vector<Row>& from, std::vector<Row>* to, std::span<int32_t> ends,
             const Digit& digit) {
  std::fill(ends.begin(), ends.end(), 0);
  for (const Row& row : from) ++ends[digit(row)];
  int32_t begin = 0;
  for (int32_t& one : ends) {
    const int32_t count = one;
    one = begin;
    begin += count;
  }
  for (const Row& row : from) (*to)[static_cast<size_t>(ends[digit(row)]++)] = row;
}

// Some tens of bytes: a call of memcpy for each of many rows takes longer than they do.
void copy_values(uint8_t* to, const uint8_t* from, size_t size_bytes) {
  constexpr size_t kWord = 16;
  if (size_bytes > 512) {
    std::memcpy(to, from, size_bytes);
    return;
  }
  for (; size_bytes >= kWord; size_bytes -= kWord, to += kWord, from += kWord) {
    std::memcpy(to, from, kWord);
  }
  for (; size_bytes > 0; size_bytes -= sizeof(float), to += sizeof(float), from += sizeof(float)) {
    std::memcpy(to, from, sizeof(float));
  }
}

uint64_t most_rows(uint32_t rows_per_slab, uint64_t records) {
  const uint64_t slabs = (records + rows_per_slab - 1) / rows_per_slab;
  return std::min<uint64_t>(slabs, PartRows::kSlabs) * rows_per_slab;
}

// Of a row in a file: key, weight, state, count, last_seen, average.
uint64_t row_bytes(const table::RecordShape& shape) {
  const uint64_t floats = uint64_t{shape.dim} * (shape.averaged ? 2 : 1) + shape.state_elements;
  return sizeof(table::RowHeader) + floats * sizeof(float);
}

constexpr uint64_t kBucketBytes = (kernels::kBucketCount + 1) * sizeof(int32_t);

void grow(kernels::AlignedBuffer<uint8_t>* buffer, uint64_t size_bytes) {
  if (buffer->size() >= size_bytes) return;
  *buffer = {};  // frees it first
  *buffer = kernels::AlignedBuffer<uint8_t>(size_bytes);
}

// Whether a row has had an update from that one on. Updates are counted on beyond 2^32.
bool changed_since(const table::RowHeader& header, uint32_t update) {
  return header.count > 0 && static_cast<int32_t>(header.last_seen - update) >= 0;
}

}  // namespace

uint64_t PartRows::size_bytes(const table::RecordShape& shape, uint32_t rows_per_slab,
                              uint64_t records) {
  const uint64_t most = most_rows(rows_per_slab, records);
  return most * (shape.stride + row_bytes(shape) + 2 * sizeof(Row)) + kBucketBytes;
}

PartRows::PartRows(const table::RecordShape& shape, uint32_t rows_per_slab, uint64_t records,
                   Memory* memory)
    : shape_(shape),
      rows_per_slab_(rows_per_slab),
      most_rows_(most_rows(rows_per_slab, records)),
      memory_(*memory),
      bucket_begin_(kernels::kBucketCount + 1) {
  grow(&memory_.records, kernels::checked_size_bytes(most_rows_, shape.stride));
  grow(&memory_.columns, kernels::checked_size_bytes(most_rows_, row_bytes(shape)) + kBucketBytes);
  memory_.rows.clear();
  memory_.rows.reserve(most_rows_);
  memory_.sorted.reserve(most_rows_);
}

void PartRows::take(uint32_t records, std::optional<uint32_t> since) {
  const uint8_t* record = next();
  for (uint32_t i = 0; i < records; ++i, record += shape_.stride) {
    table::RowHeader header;
    std::memcpy(&header, record, sizeof header);
    if (!header.is_row() || (since && !changed_since(header, *since))) continue;
    if (next() != record) std::memcpy(next(), record, shape_.stride);
    memory_.rows.push_back({header.key, kernels::bucket_of(header.key, shape_.salt),
                            static_cast<uint32_t>(memory_.rows.size())});
  }
}

void PartRows::sort() {
  std::vector<Row>& rows = memory_.rows;
  std::vector<Row>& sorted = memory_.sorted;
  sorted.resize(rows.size());
  if (rows.empty()) return;
  uint64_t varying = 0;
  for (const Row& row : rows) varying |= order_of(row.key) ^ order_of(rows.front().key);
  const auto last = static_cast<uint32_t>(std::bit_width(varying));
  uint32_t shift = varying == 0 ? 0 : static_cast<uint32_t>(std::countr_zero(varying));
  const uint32_t digits = (last - shift + kDigitBits - 1) / kDigitBits;
  const uint32_t bits = digits == 0 ? 0 : (last - shift + digits - 1) / digits;
  std::vector<int32_t> ends(size_t{1} << bits);
  for (; shift < last; shift += bits) {
    sort_by(rows, &sorted, ends, [shift, mask = ends.size() - 1](const Row& row) {
      return (order_of(row.key) >> shift) & mask;
    });
    rows.swap(sorted);
  }
  sort_by(rows, &sorted, std::span(bucket_begin_).subspan(1),
          [](const Row& row) { return row.bucket; });
}

std::vector<TensorEntry> PartRows::entries() const {
  const uint64_t rows = memory_.sorted.size();
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

std::string PartRows::head() const { return tensors_head("torch_cpudist.rows", entries()); }

std::span<const uint8_t> PartRows::columns() {
  const std::vector<Row>& sorted = memory_.sorted;
  const size_t count = sorted.size();
  const size_t weight_bytes = shape_.dim * sizeof(float);
  const size_t state_bytes = shape_.state_elements * sizeof(float);
  const size_t average_bytes = shape_.averaged ? weight_bytes : 0;
  uint8_t* key = memory_.columns.data();
  uint8_t* weight = key + count * sizeof(int64_t);
  uint8_t* state = weight + count * weight_bytes;
  uint8_t* counted = state + count * state_bytes;
  uint8_t* last_seen = counted + count * sizeof(uint32_t);
  uint8_t* average = last_seen + count * sizeof(uint32_t);
  const uint8_t* const records = memory_.records.data();
  const size_t ahead = count - std::min(count, kAhead);
  for (size_t i = 0; i < count; ++i) {
    if (i < ahead) {
      const uint8_t* const later = records + sorted[i + kAhead].place * shape_.stride;
      const size_t begin = reinterpret_cast<uintptr_t>(later) % kernels::kCacheLineBytes;
      const size_t end = begin + std::min(shape_.stride, kBytesAhead);
      for (size_t at = 0; at < end; at += kernels::kCacheLineBytes) {
        __builtin_prefetch(later - begin + at);
      }
    }
    const uint8_t* const record = records + sorted[i].place * shape_.stride;
    const uint8_t* const values = record + sizeof(table::RowHeader);
    std::memcpy(key + i * sizeof(int64_t), &sorted[i].key, sizeof(int64_t));
    copy_values(weight + i * weight_bytes, values, weight_bytes);
    copy_values(state + i * state_bytes, values + weight_bytes, state_bytes);
    std::memcpy(counted + i * sizeof(uint32_t), record + offsetof(table::RowHeader, count),
                sizeof(uint32_t));
    std::memcpy(last_seen + i * sizeof(uint32_t), record + offsetof(table::RowHeader, last_seen),
                sizeof(uint32_t));
    copy_values(average + i * average_bytes, values + weight_bytes + state_bytes, average_bytes);
  }
  uint8_t* const buckets = average + count * average_bytes;
  std::memcpy(buckets, bucket_begin_.data(), kBucketBytes);
  memory_.rows.clear();
  return {memory_.columns.data(), static_cast<size_t>(buckets + kBucketBytes - key)};
}

}  // namespace cpudist::server
