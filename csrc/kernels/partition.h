// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Stable partition of a batch's keys by the server that owns them.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cpudist::kernels {

// Keeps scratch memory between calls. Not thread safe.
class KeyPartitioner {
 public:
  // order (room for n) receives the positions of keys grouped by owner, in their original order
  // within an owner; offsets (room for part_count + 1) where each owner's group starts.
  // bucket_owner has kBucketCount entries, and the caller has seen that all are below part_count.
  // Throws std::length_error for n >= 2^31.
  void run(const int64_t* keys, size_t n, uint64_t salt, const uint16_t* bucket_owner,
           size_t part_count, uint32_t* order, uint32_t* offsets);

 private:
  std::vector<uint16_t> owners_;
  std::vector<uint32_t> cursors_;
};

}  // namespace cpudist::kernels
