// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How rows of remote tables come into being: those that the pushes of an update name and nobody has
// pushed before. They are numbered in the order of ranks, tables and batches, whatever the number
// of threads; all memory is there before the first of them is.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/dedupe.h"
#include "server/update/pool.h"
#include "server/update/push.h"
#include "table/store.h"

namespace cpudist::server {

// Thread safety: one caller at a time, who also has the store to itself from plan() to make().
class NewRows {
 public:
  // Finds what is to be made, and the memory for it. Throws std::bad_alloc or, where a table is
  // full, Error(kOverloaded); no row has changed then.
  void plan(const Pushes& pushes, table::ParamStore& store);
  // Makes them, and tells the pushes their records.
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
    size_t told = 0;  // keys whose pushes know their records
  };

  static void find(Wanted& wanted, table::Table& table, kernels::KeyDeduper& deduper);
  Wanted* find_table(uint32_t table);

  std::vector<Wanted> wanted_;  // by table, those of which rows are missing
  kernels::KeyDeduper deduper_;
};

}  // namespace cpudist::server
