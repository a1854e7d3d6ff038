// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The values of one parameter set on one server.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "table/dense_block.h"
#include "table/table.h"

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

}  // namespace cpudist::table
