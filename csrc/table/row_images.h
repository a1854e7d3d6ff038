// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What rows of a table were at a cut, of those that change before a snapshot has copied them. One
// slab after the other is copied as it is, and then its images are laid over the copy.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "table/image_memory.h"

namespace cpudist::table {

// Thread safety: keep() from any number of threads for different shards; overlay() alone.
class RowImages {
 public:
  // Of records 0 .. rows, `per_slab` in a slab, of `stride` bytes each. Takes a bit for each of
  // them. Throws std::bad_alloc.
  RowImages(uint64_t rows, uint32_t per_slab, uint64_t stride, size_t shards,
            std::shared_ptr<ImageMemory> memory);
  ~RowImages();
  // What it takes from the beginning, beside images.
  static uint64_t size_bytes(uint64_t rows, uint32_t per_slab, size_t shards) {
    return (rows / 64 + 1) * sizeof(uint64_t) +
           shards * (sizeof(Arena) + (rows + per_slab - 1) / per_slab * sizeof(Image*));
  }
  RowImages(const RowImages&) = delete;
  RowImages& operator=(const RowImages&) = delete;

  // Keeps the row at `row` unless it was kept before. Where there is no memory for it the snapshot
  // has failed, and what changes the row goes on.
  void keep(uint32_t record, size_t shard, const uint8_t* row) noexcept;
  // Puts the images of a slab over `rows`, its copy, and frees them. Once for each slab, and
  // nothing of it is kept afterwards.
  void overlay(uint32_t slab, uint8_t* rows) noexcept;

  const std::shared_ptr<ImageMemory>& memory() const { return memory_; }

 private:
  struct Chunk;
  struct Image {  // the bytes of its row follow
    Image* next;  // of its slab and shard
    Chunk* chunk;
    uint32_t record;
    uint32_t zero;
  };
  struct Chunk {  // its images follow
    uint32_t live = 0;
    bool full = false;
    uint64_t size_bytes = 0;  // in all
    Chunk* before = nullptr;
    Chunk* after = nullptr;
  };
  struct alignas(64) Arena {  // of one shard
    Chunk* chunks = nullptr;  // all of them; the first takes new images
    uint64_t used = 0;        // bytes of the first
  };
  struct FreeBits {
    void operator()(std::atomic<uint64_t>* bits) const noexcept;
  };

  // Whether it was kept before; now it is.
  bool mark(uint32_t record) noexcept;
  uint8_t* allocate(Arena& arena) noexcept;
  bool extend(Arena& arena) noexcept;
  void free_chunk(Arena& arena, Chunk* chunk) noexcept;

  const uint32_t per_slab_;
  const uint64_t stride_;
  const uint64_t image_bytes_;
  const std::shared_ptr<ImageMemory> memory_;
  std::unique_ptr<std::atomic<uint64_t>[], FreeBits> kept_;
  std::vector<Arena> arenas_;
  std::vector<Image*> heads_;  // by slab and shard
};

}  // namespace cpudist::table
