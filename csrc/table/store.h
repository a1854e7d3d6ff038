// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The values of one parameter set on one server.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/memory_cap.h"
#include "table/ahead.h"
#include "table/dense_block.h"
#include "table/table.h"
#include "wire/layout.h"

namespace cpudist::table {

// The tables and the blocks of this server (null for blocks of others), by id.
struct ParamStore {
  Averaging averaging;
  std::vector<std::unique_ptr<Table>> tables;
  std::vector<std::unique_ptr<DenseBlock>> blocks;

  // Record numbers mean nothing any more once it is another.
  uint64_t generation() const {
    uint64_t sum = 0;
    for (const auto& table : tables) sum += table->generation();
    return sum;
  }
};

// The tables and blocks of a layout as one server has them; `ahead` and `cap` are those of Table.
ParamStore make_store(const wire::ParamSetLayout& layout, uint32_t shard_id, uint32_t server_count,
                      const std::shared_ptr<MemoryAhead>& ahead,
                      const std::shared_ptr<MemoryCap>& cap);
// What they take once everything is stored; of remote tables, before there is a row.
uint64_t planned_bytes(const ParamStore& store);

}  // namespace cpudist::table
