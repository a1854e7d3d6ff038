// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Block slicing.

#include "kernels/slicing.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace cpudist::kernels {
namespace {

void require_at_least(int64_t value, int64_t least, const char* name) {
  if (value < least) {
    throw std::invalid_argument(std::string("slice_parameter: ") + name + ": expected at least " +
                                std::to_string(least) + ", found " + std::to_string(value));
  }
}

// a / b rounded up without overflow, for a >= 1 and b >= 1.
int64_t ceil_divide(int64_t a, int64_t b) { return (a - 1) / b + 1; }

}  // namespace

std::vector<BlockSpan> slice_parameter(int64_t numel, int64_t row_width, int64_t server_count,
                                       int64_t min_block_size, bool slice) {
  require_at_least(numel, 0, "numel");
  require_at_least(row_width, 1, "row_width");
  require_at_least(server_count, 1, "server_count");
  require_at_least(min_block_size, 1, "min_block_size");
  if (numel == 0) return {};
  const int64_t servers = slice ? server_count : 1;
  const int64_t block_limit = std::max<int64_t>(1, numel / min_block_size);
  int64_t block_size = ceil_divide(numel, std::min(servers, block_limit));
  const int64_t rows_per_block = ceil_divide(block_size, row_width);
  if (rows_per_block > std::numeric_limits<int64_t>::max() / row_width) {
    block_size = numel;
  } else {
    block_size = std::min(numel, rows_per_block * row_width);
  }
  std::vector<BlockSpan> blocks;
  blocks.reserve(static_cast<size_t>(ceil_divide(numel, block_size)));
  for (int64_t begin = 0; begin < numel; begin += block_size) {
    const int64_t size = std::min(block_size, numel - begin);
    blocks.push_back({begin, size});
    if (size == numel - begin) break;  // begin + block_size may not fit
  }
  return blocks;
}

}  // namespace cpudist::kernels
