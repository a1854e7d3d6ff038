// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/slot_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <utility>

namespace cpudist::table {
namespace {

// Of all arrays of one size, below which pages need no care.
constexpr size_t kMuchBytes = size_t{8} << 20;

}  // namespace

bool SlotMemory::in_chunks(size_t size_bytes) const {
  return size_bytes >= kLeastBytes && size_bytes <= kChunkBytes &&
         size_bytes * arrays_ >= kMuchBytes;
}

size_t SlotMemory::order_of(size_t size_bytes) {
  return static_cast<size_t>(std::countr_zero(size_bytes / kLeastBytes));
}

SlotMemory::Chunk& SlotMemory::chunk_of(const void* memory) {
  const auto* const at = static_cast<const uint8_t*>(memory);
  const auto after =
      std::upper_bound(chunks_.begin(), chunks_.end(), at,
                       [](const uint8_t* a, const Chunk& b) { return a < b.memory.data(); });
  return *(after - 1);
}

uint8_t& SlotMemory::mark_of(Chunk& chunk, const void* block) {
  const auto offset = static_cast<const uint8_t*>(block) - chunk.memory.data();
  return chunk.free[static_cast<size_t>(offset) / kLeastBytes];
}

void SlotMemory::put(Chunk& chunk, void* memory, size_t order) noexcept {
  auto* const block = new (memory) Block{free_[order], nullptr};
  if (block->next != nullptr) block->next->before = block;
  free_[order] = block;
  mark_of(chunk, block) = static_cast<uint8_t>(order + 1);
}

void SlotMemory::take(Chunk& chunk, Block* block, size_t order) noexcept {
  if (block->next != nullptr) block->next->before = block->before;
  (block->before != nullptr ? block->before->next : free_[order]) = block->next;
  mark_of(chunk, block) = 0;
}

SlotMemory::Block* SlotMemory::add_chunk() {
  Chunk chunk;
  chunk.memory = kernels::AlignedBuffer<uint8_t>(kChunkBytes);
  uint8_t* const begin = chunk.memory.data();
  const auto place =
      std::upper_bound(chunks_.begin(), chunks_.end(), begin,
                       [](const uint8_t* a, const Chunk& b) { return a < b.memory.data(); });
  put(*chunks_.insert(place, std::move(chunk)), begin, kOrders - 1);
  spare_bytes_ += kChunkBytes;
  return free_[kOrders - 1];
}

void* SlotMemory::allocate(size_t size_bytes) {
  if (!in_chunks(size_bytes)) return kernels::allocate_aligned(size_bytes);
  const size_t wanted = order_of(size_bytes);
  size_t order = wanted;
  while (order < kOrders && free_[order] == nullptr) ++order;
  Block* const block = order < kOrders ? free_[order] : add_chunk();
  order = std::min(order, kOrders - 1);
  Chunk& chunk = chunk_of(block);
  take(chunk, block, order);
  while (order > wanted) {
    --order;
    put(chunk, reinterpret_cast<uint8_t*>(block) + (kLeastBytes << order), order);
  }
  spare_bytes_ -= size_bytes;
  return std::memset(static_cast<void*>(block), 0, size_bytes);
}

void SlotMemory::free(void* memory, size_t size_bytes) noexcept {
  if (memory == nullptr) return;
  if (!in_chunks(size_bytes)) return kernels::free_aligned(memory);
  Chunk& chunk = chunk_of(memory);
  spare_bytes_ += size_bytes;
  size_t order = order_of(size_bytes);
  auto* block = static_cast<uint8_t*>(memory);
  for (; order < kOrders - 1; ++order) {
    const size_t offset = static_cast<size_t>(block - chunk.memory.data());
    uint8_t* const other = chunk.memory.data() + (offset ^ (kLeastBytes << order));
    if (mark_of(chunk, other) != order + 1) break;
    take(chunk, std::launder(reinterpret_cast<Block*>(other)), order);
    block = std::min(block, other);
  }
  if (order < kOrders - 1 || free_[order] == nullptr) return put(chunk, block, order);
  // One free chunk is enough.
  spare_bytes_ -= kChunkBytes;
  chunks_.erase(chunks_.begin() + (&chunk - chunks_.data()));
}

}  // namespace cpudist::table
