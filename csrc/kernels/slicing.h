// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How a dense parameter is cut into the blocks that servers own.

#pragma once

#include <cstdint>
#include <vector>

namespace cpudist::kernels {

// Elements [begin, begin + size) of the flattened parameter.
struct BlockSpan {
  int64_t begin;
  int64_t size;
};

// Cuts numel elements for server_count servers: at most one block per server and per
// min_block_size elements, equal sizes rounded up, then up to whole rows of row_width elements
// (the product of all dimensions but the first; 1 for vectors). Every element is in exactly one
// block, blocks are in order, none is empty. slice=false gives one block. No element, no block.
// Throws std::invalid_argument for a negative numel or for a row_width, server_count or
// min_block_size below 1.
std::vector<BlockSpan> slice_parameter(int64_t numel, int64_t row_width, int64_t server_count,
                                       int64_t min_block_size, bool slice);

}  // namespace cpudist::kernels
