// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Memory for the many arrays of slots of an index: those of some size lie together on huge pages,
// as a lookup in a large index waits for the page walk before it waits for the slot.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/aligned.h"

namespace cpudist::table {

// Arrays whose sizes are powers of two of cache lines. Those that a chunk of 2 MiB has room for
// are its halves, quarters and so on; two free ones that were one become one again. Not thread
// safe.
class SlotMemory {
 public:
  // How many arrays of one size there may be: a chunk is not made for a few small ones.
  explicit SlotMemory(size_t arrays) : arrays_(arrays) {}
  SlotMemory(SlotMemory&&) = default;
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

  // Zero-filled, at the beginning of a cache line. Throws std::bad_alloc.
  void* allocate(size_t size_bytes);
  void free(void* memory, size_t size_bytes) noexcept;
  // In chunks, and given to nobody.
  size_t spare_bytes() const { return spare_bytes_; }
  // Whether arrays of this size lie in chunks, and what chunks arrays of `size_bytes` in all may
  // need beside what is there.
  bool in_chunks(size_t size_bytes) const;
  size_t new_chunks_bytes(size_t size_bytes) const {
    if (size_bytes <= spare_bytes_) return 0;
    return (size_bytes - spare_bytes_ + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
  }

 private:
  static constexpr size_t kChunkBytes = size_t{2} << 20;
  static constexpr size_t kLeastBytes = size_t{16} << 10;  // of what a chunk is divided into
  static constexpr size_t kUnits = kChunkBytes / kLeastBytes;
  static constexpr size_t kOrders = 8;  // from kLeastBytes to kChunkBytes
  static_assert(kLeastBytes << (kOrders - 1) == kChunkBytes);

  // Lies at the beginning of a free block.
  struct Block {
    Block* next;
    Block* before;
  };
  struct Chunk {
    kernels::AlignedBuffer<uint8_t> memory;
    std::array<uint8_t, kUnits> free{};  // 1 + order of the free block that begins there
  };

  static size_t order_of(size_t size_bytes);
  Chunk& chunk_of(const void* memory);
  static uint8_t& mark_of(Chunk& chunk, const void* block);
  void put(Chunk& chunk, void* memory, size_t order) noexcept;
  void take(Chunk& chunk, Block* block, size_t order) noexcept;
  Block* add_chunk();

  size_t arrays_;
  std::vector<Chunk> chunks_;  // by address
  std::array<Block*, kOrders> free_{};
  size_t spare_bytes_ = 0;
};

}  // namespace cpudist::table
