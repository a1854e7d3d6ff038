// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Finding shared allocations by address.
#include "backends/shm/buffers.h"

#include <utility>

namespace cpudist::shm {

void Buffers::add(std::shared_ptr<SharedBuffer> buffer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
  by_address_[reinterpret_cast<uintptr_t>(buffer->own())] = std::move(buffer);
}

std::shared_ptr<SharedBuffer> Buffers::find(const void* begin, size_t size_bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const std::lock_guard lock(mutex_);
  auto found = by_address_.upper_bound(address);
  if (found == by_address_.begin()) return nullptr;
  --found;
  std::shared_ptr<SharedBuffer> buffer = found->second.lock();
  if (buffer == nullptr || address + size_bytes > found->first + buffer->size_bytes) return nullptr;
  return buffer;
}

}  // namespace cpudist::shm
