// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A batch as tensors see it: two flat arrays, of integers and of floats, in sections per slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "data/parse/records.h"
#include "data/parse/schema.h"

namespace cpudist::data {

// Memory that is not cleared when it grows, and kept when it shrinks.
template <typename T>
class Array {
 public:
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }
  // What was there is lost.
  void resize_lost(size_t size) {
    if (size > capacity_) {
      data_ = std::make_unique_for_overwrite<T[]>(size);
      capacity_ = size;
    }
    size_ = size;
  }

 private:
  std::unique_ptr<T[]> data_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

// Where an integer slot's part of `Batch::ints` is, while it is filled.
struct IntSection {
  uint32_t dim = kAnyNumber;
  size_t values = 0;
  int64_t* next = nullptr;
  int64_t* offsets = nullptr;
};

struct FloatSection {
  uint32_t dim = 1;
  float* next = nullptr;
};

struct Batch {
  size_t records = 0;
  // Per used slot in the schema's order. Integers of fixed dim: `[records, dim]` in `ints`. Of any
  // number: values `[nnz]`, directly followed by offsets `[records + 1]`. Floats: `[records, dim]`
  // in `floats`.
  Array<int64_t> ints;
  Array<float> floats;
  std::vector<size_t> values;            // per used slot: how many values its section has (nnz)
  std::vector<uint64_t> instance_ids;    // per record, when the schema has them
  std::vector<IntSection> int_sections;  // per used slot of its kind, for assemble()
  std::vector<FloatSection> float_sections;

  size_t capacity_bytes() const {
    return ints.capacity() * sizeof(int64_t) + floats.capacity() * sizeof(float) +
           instance_ids.capacity() * sizeof(uint64_t);
  }
};

// Fills `batch` from records, in their order. Reads the counts of all records first, so that every
// section's place is known, then copies. No allocation when the batch's memory suffices. Prefetches
// what lies behind pointers that point everywhere.
void assemble(const Schema& schema, std::span<const uint64_t* const> records, Batch& batch);

}  // namespace cpudist::data
