// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The values of one parameter set on one server.
#pragma once

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
};

}  // namespace cpudist::table
