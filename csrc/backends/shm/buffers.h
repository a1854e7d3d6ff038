// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Memory of the user that every rank of a group maps: what is in it is summed without being copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/shm/segment.h"

namespace cpudist::shm {

// One allocation: a part of each rank, of equal size. Alive until its last user.
struct SharedBuffer {
  uint64_t id = 0;  // the same on all ranks, 1 or more
  size_t size_bytes = 0;
  int rank = 0;
  std::vector<SharedMemory> parts;  // by rank

  std::byte* own() const { return parts[static_cast<size_t>(rank)].data(); }
};

// The allocations of one rank, to be found by address. Thread-safe.
class Buffers {
 public:
  void add(std::shared_ptr<SharedBuffer> buffer);
  // The allocation that holds the range; null if there is none.
  std::shared_ptr<SharedBuffer> find(const void* begin, size_t size_bytes) const;

 private:
  mutable std::mutex mutex_;
  std::map<uintptr_t, std::weak_ptr<SharedBuffer>> by_address_;
};

}  // namespace cpudist::shm
