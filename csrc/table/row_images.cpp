// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/row_images.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace cpudist::table {
namespace {

constexpr uint64_t kFirstChunkBytes = 4096;
constexpr uint64_t kLargestChunkBytes = 256u << 10;

uint64_t rounded(uint64_t size_bytes) { return (size_bytes + 7) / 8 * 8; }

}  // namespace

void RowImages::FreeBits::operator()(std::atomic<uint64_t>* bits) const noexcept {
  std::free(static_cast<void*>(bits));
}

RowImages::RowImages(uint64_t rows, uint32_t per_slab, uint64_t stride, size_t shards,
                     std::shared_ptr<ImageMemory> memory)
    : per_slab_(per_slab),
      stride_(stride),
      image_bytes_(sizeof(Image) + rounded(stride)),
      memory_(std::move(memory)),
      arenas_(shards),
      heads_(shards * ((rows + per_slab - 1) / per_slab)) {
  // Zeros that the system makes when they are first touched: the lock of the set is held.
  static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t));
  kept_.reset(static_cast<std::atomic<uint64_t>*>(std::calloc(rows / 64 + 1, sizeof(uint64_t))));
  if (kept_ == nullptr) throw std::bad_alloc();
}

RowImages::~RowImages() {
  for (Arena& arena : arenas_) {
    while (arena.chunks != nullptr) free_chunk(arena, arena.chunks);
  }
}

// Rows of one word may be of different shards.
bool RowImages::mark(uint32_t record) noexcept {
  const uint64_t bit = uint64_t{1} << (record % 64);
  std::atomic<uint64_t>& word = kept_[record / 64];
  if ((word.load(std::memory_order_relaxed) & bit) != 0) return true;
  word.fetch_or(bit, std::memory_order_relaxed);
  return false;
}

void RowImages::keep(uint32_t record, size_t shard, const uint8_t* row) noexcept {
  // A failed snapshot keeps nothing more.
  if (memory_->failure() != ImageMemory::Failure::kNone || mark(record)) return;
  Arena& arena = arenas_[shard];
  uint8_t* const place = allocate(arena);
  if (place == nullptr) return;
  Image*& head = heads_[size_t{record / per_slab_} * arenas_.size() + shard];
  Image* const image = new (place) Image{head, arena.chunks, record, 0};
  std::memcpy(image + 1, row, stride_);
  head = image;
}

uint8_t* RowImages::allocate(Arena& arena) noexcept {
  Chunk* const first = arena.chunks;
  if (first == nullptr || arena.used + image_bytes_ > first->size_bytes) {
    if (first != nullptr) first->full = true;
    if (!extend(arena)) return nullptr;
    // Its images were all taken while it could still take more.
    if (first != nullptr && first->live == 0) free_chunk(arena, first);
  }
  uint8_t* const place = reinterpret_cast<uint8_t*>(arena.chunks) + arena.used;
  arena.used += image_bytes_;
  ++arena.chunks->live;
  return place;
}

bool RowImages::extend(Arena& arena) noexcept {
  const uint64_t last = arena.chunks == nullptr ? kFirstChunkBytes / 2 : arena.chunks->size_bytes;
  const uint64_t size_bytes =
      std::max(std::min(2 * last, kLargestChunkBytes), sizeof(Chunk) + image_bytes_);
  if (!memory_->take(size_bytes)) return false;
  void* const place = std::malloc(size_bytes);
  if (place == nullptr) {
    memory_->give_back(size_bytes);
    memory_->fail(ImageMemory::Failure::kMemory);
    return false;
  }
  Chunk* const chunk = new (place) Chunk{0, false, size_bytes, nullptr, arena.chunks};
  if (arena.chunks != nullptr) arena.chunks->before = chunk;
  arena.chunks = chunk;
  arena.used = sizeof(Chunk);
  return true;
}

void RowImages::free_chunk(Arena& arena, Chunk* chunk) noexcept {
  if (chunk->before != nullptr) chunk->before->after = chunk->after;
  if (chunk->after != nullptr) chunk->after->before = chunk->before;
  if (arena.chunks == chunk) arena.chunks = chunk->after;
  memory_->give_back(chunk->size_bytes);
  std::free(chunk);
}

void RowImages::overlay(uint32_t slab, uint8_t* rows) noexcept {
  for (size_t shard = 0; shard < arenas_.size(); ++shard) {
    Image*& head = heads_[size_t{slab} * arenas_.size() + shard];
    for (const Image* image = std::exchange(head, nullptr); image != nullptr;) {
      std::memcpy(rows + uint64_t{image->record % per_slab_} * stride_, image + 1, stride_);
      Chunk* const chunk = image->chunk;
      image = image->next;
      if (--chunk->live == 0 && chunk->full) free_chunk(arenas_[shard], chunk);
    }
  }
}

}  // namespace cpudist::table
