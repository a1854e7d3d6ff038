// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The rows of one part of a snapshot: copies of records, put in the order of their buckets and
// keys and into columns.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/snapshot/output.h"
#include "server/snapshot/tensors.h"
#include "table/table.h"

namespace cpudist::server {

// Thread safety: one caller at a time. Memory is kept from one part to the next.
class PartRows {
 public:
  static constexpr uint32_t kSlabs = 8;

  // Throws std::bad_alloc.
  PartRows(const table::RecordShape& shape, uint32_t rows_per_slab);

  // Where the next slab is to be copied, and how many records then were.
  uint8_t* next() { return records_.get() + rows_.size() * shape_.stride; }
  void take(uint32_t records);
  bool empty() const { return rows_.empty(); }
  bool full() const { return slabs_ == kSlabs; }
  uint64_t size() const { return rows_.size(); }

  // The file of all that was taken, which begins anew then.
  void write(OutputFile* file);

 private:
  struct Row {
    int64_t key;
    uint32_t bucket;
    uint32_t place;  // of its record
  };
  struct FreeMemory {
    void operator()(uint8_t* memory) const noexcept { ::operator delete(memory); }
  };

  std::vector<TensorEntry> entries() const;
  void sort();
  // The bytes at `offset` of every record, in the order of the rows.
  void append_column(OutputFile* file, uint64_t offset, uint64_t size_bytes);

  const table::RecordShape shape_;
  std::unique_ptr<uint8_t[], FreeMemory> records_;
  uint32_t slabs_ = 0;
  std::vector<Row> rows_;
  std::vector<Row> sorted_;
  std::vector<uint8_t> column_;
  std::vector<int32_t> bucket_begin_;
};

}  // namespace cpudist::server
