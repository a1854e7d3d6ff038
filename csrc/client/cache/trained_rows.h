// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of a remote table that their trainer steps by itself, as lookups find them.
#pragma once

#include <cstdint>

namespace cpudist::client {

// Called under the mutex of the table's cache, as is everything that changes what it finds.
class TrainedRows {
 public:
  virtual ~TrainedRows() = default;
  // The values of a row, valid until the mutex is released; null if the trainer has none.
  virtual const float* find_trained(int64_t key) const = 0;
};

}  // namespace cpudist::client
