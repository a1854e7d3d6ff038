// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The rows of one part of a snapshot: copies of records, put in the order of their buckets and
// keys and into columns.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/aligned.h"
#include "server/snapshot/tensors.h"
#include "table/table.h"

namespace cpudist::server {

// Thread safety: one caller at a time.
class PartRows {
 public:
  static constexpr uint32_t kSlabs = 8;

  // What it works with, kept from one table to the next.
  struct Row {
    int64_t key;
    uint32_t bucket;
    uint32_t place;  // of its record
  };
  struct Memory {
    kernels::AlignedBuffer<uint8_t> records{};
    kernels::AlignedBuffer<uint8_t> columns{};
    std::vector<Row> rows{};
    std::vector<Row> sorted{};
  };
  // What that takes for parts of a table of so many records.
  static uint64_t size_bytes(const table::RecordShape& shape, uint32_t rows_per_slab,
                             uint64_t records);

  // Throws std::bad_alloc. `records`: of the table.
  PartRows(const table::RecordShape& shape, uint32_t rows_per_slab, uint64_t records,
           Memory* memory);

  // Where the next slab is to be copied, and how many records then were. Those are taken that are
  // of a row; with `since`, whose last update came from that one on.
  uint8_t* next() { return memory_.records.data() + memory_.rows.size() * shape_.stride; }
  void take(uint32_t records, std::optional<uint32_t> since = {});
  bool empty() const { return memory_.rows.empty(); }
  // There is no room for another slab.
  bool full() const { return memory_.rows.size() + rows_per_slab_ > most_rows_; }
  uint64_t size() const { return memory_.rows.size(); }

  // Puts what was taken in order.
  void sort();
  // After that: what the file of these rows begins with, and all that follows. New rows can be
  // taken then; the bytes stay until the next call.
  std::string head() const;
  std::span<const uint8_t> columns();

 private:
  std::vector<TensorEntry> entries() const;

  const table::RecordShape shape_;
  const uint32_t rows_per_slab_;
  const uint64_t most_rows_;
  Memory& memory_;
  std::vector<int32_t> bucket_begin_;
};

}  // namespace cpudist::server
