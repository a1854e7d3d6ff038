// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Counting sort of keys by owner.

#include "kernels/partition.h"

#include <stdexcept>

#include "kernels/hash.h"

namespace cpudist::kernels {

void KeyPartitioner::run(const int64_t* keys, size_t n, uint64_t salt, const uint16_t* bucket_owner,
                         size_t part_count, uint32_t* order, uint32_t* offsets) {
  if (n >= (size_t{1} << 31)) {
    throw std::length_error("KeyPartitioner: a batch holds at most 2^31 - 1 keys; split it");
  }
  if (owners_.size() < n) owners_.resize(n);
  cursors_.assign(part_count, 0);
  for (size_t i = 0; i < n; ++i) {
    const uint16_t owner = bucket_owner[bucket_of(keys[i], salt)];
    owners_[i] = owner;
    ++cursors_[owner];
  }
  uint32_t total = 0;
  for (size_t part = 0; part < part_count; ++part) {
    offsets[part] = total;
    total += cursors_[part];
    cursors_[part] = offsets[part];
  }
  offsets[part_count] = total;
  for (size_t i = 0; i < n; ++i) order[cursors_[owners_[i]]++] = static_cast<uint32_t>(i);
}

}  // namespace cpudist::kernels
