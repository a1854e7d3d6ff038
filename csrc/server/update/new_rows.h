// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How rows of remote tables come into being: those that the pushes of an update name, that are not
// there, and that their tables admit; others are dropped from the pushes. They are numbered in the
// order of ranks, tables and batches, whatever the number of threads; all memory is there before
// the first of them is.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/memory_cap.h"
#include "kernels/dedupe.h"
#include "server/update/admission.h"
#include "server/update/pool.h"
#include "server/update/push.h"
#include "table/store.h"

namespace cpudist::server {

// What rows that are to be made add to what is kept.
struct RowGrowth {
  std::string table;  // the one that adds most
  uint64_t rows = 0;  // of all tables
  uint64_t bytes = 0;
  uint64_t own_bytes = 0;           // of the pushes that want them
  uint64_t own_waiting_bytes = 0;   // of which count as waiting
  uint64_t own_reserved_bytes = 0;  // of which are reserved
};
// Counts them until they are made. Throws Error(kFull) where there will never be room under a cap,
// and kOverloaded where there may be.
using RowMemory = std::function<MemoryCap::Reservation(const RowGrowth& growth)>;

// Thread safety: one caller at a time, who also has the store to itself from plan() to make().
class NewRows {
 public:
  // Null: there is no cap.
  explicit NewRows(RowMemory memory) : memory_(std::move(memory)) {}

  // Finds what is to be made, and the memory for it, all or none. Throws std::bad_alloc, as
  // RowMemory, Error(kFull) where a server can number no more rows, or Error(kTableFull) where a
  // table may have no more; no row has changed then, and no push was counted.
  void plan(const Pushes& pushes, table::ParamStore& store);
  // Makes them, and tells the pushes their records; rows that are not applied leave the pushes.
  void make(Pushes& pushes, table::ParamStore& store, UpdatePool& pool) noexcept;

 private:
  struct Wanted {  // of one table
    uint32_t table = 0;
    std::vector<int64_t> keys;  // missing when their pushes arrived, in the order of ranks
    std::vector<int64_t> distinct;
    std::vector<uint32_t> inverse;  // of keys: the place in `distinct`
    std::vector<uint32_t> records;  // of distinct keys
    std::vector<int64_t> absent;    // those of them that are still missing
    std::vector<uint32_t> made;
    std::vector<size_t> ends;     // of each push: where its keys end
    std::vector<uint8_t> counts;  // of each push: whether it has weight
    AdmittedKeys admitted;
    size_t told = 0;  // keys whose pushes know their records
  };

  static void find(Wanted& wanted, table::Table& table, kernels::KeyDeduper& deduper);
  static void make_rows(Wanted& wanted, table::Table& table, UpdatePool& pool) noexcept;
  static void tell(Wanted& wanted, SectionRows* rows) noexcept;
  MemoryCap::Reservation reserve(const Pushes& pushes, const table::ParamStore& store) const;
  RowGrowth growth(const Pushes& pushes, const table::ParamStore& store) const;
  Wanted* find_table(uint32_t table);

  const RowMemory memory_;
  std::vector<Wanted> wanted_;  // by table, those of which rows are missing
  kernels::KeyDeduper deduper_;
};

}  // namespace cpudist::server
