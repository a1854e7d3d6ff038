// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a policy may do to a gradient before it is applied.
#pragma once

#include <cstdint>
#include <span>

#include "table/store.h"

namespace cpudist::server {

// What changes a merged gradient between its merging and its update. Thread safety: from
// any number of threads for different blocks, or different rows.
class Correction {
 public:
  virtual ~Correction() = default;
  // The corrected gradient of a block: `out`, or `gradient` if there is nothing to correct.
  virtual const void* correct(const table::DenseBlock& block, const void* gradient, void* out) = 0;
  // Of rows, gradients[i] belonging to records[i]. Those that change go to out, [rows, dim], in
  // which a gradient may lie at its place already; gradients[i] then points there.
  virtual void correct(const table::Table& table, std::span<const int64_t> records,
                       const float** gradients, float* out) = 0;
};

}  // namespace cpudist::server
