// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Aligned allocation and the free list of large blocks.

#include "base/buffer.h"

#include <cstdlib>
#include <new>
#include <optional>
#include <utility>

namespace cpudist {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kPage = 4096;
constexpr size_t kPooledBytesMin = 64 * 1024;  // smaller blocks are the allocator's own strength
constexpr size_t kRoomBytesMin = 1024 * 1024;
constexpr size_t kLargest = SIZE_MAX / 4;  // keeps every rounding below free of overflow

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

uint8_t* allocate(size_t capacity) {
  void* memory = std::aligned_alloc(kAlignment, capacity);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<uint8_t*>(memory);
}

}  // namespace

// Blocks of a pool have at least kPooledBytesMin bytes.
struct Buffer::Block {
  Block(size_t size, std::shared_ptr<BufferPool> owner, MemoryCap::Reservation bytes)
      : reservation(std::in_place, std::move(bytes)),
        pool(size >= kPooledBytesMin ? std::move(owner) : nullptr) {
    if (pool) {
      data = pool->take(size, &capacity);
    } else {
      capacity = round_up(size, kAlignment);
      data = allocate(capacity);
    }
  }
  ~Block() {
    reservation.reset();  // the pool may want its room
    if (pool) {
      pool->give_back(data, capacity);
    } else {
      std::free(data);
    }
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::optional<MemoryCap::Reservation> reservation;
  std::shared_ptr<BufferPool> pool;
  uint8_t* data = nullptr;
  size_t capacity = 0;
};

Buffer::Buffer(size_t size, std::shared_ptr<BufferPool> pool, MemoryCap::Reservation reservation)
    : size_(size) {
  if (size == 0) return;
  if (size > kLargest) throw std::bad_alloc();
  block_ = std::make_shared<Block>(size, std::move(pool), std::move(reservation));
  data_ = block_->data;
}

Buffer::Buffer(Buffer&& other) noexcept
    : block_(std::move(other.block_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    block_ = std::move(other.block_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

Buffer Buffer::share() const {
  Buffer other;
  other.block_ = block_;
  other.data_ = data_;
  other.size_ = size_;
  return other;
}

uint64_t Buffer::reserved_bytes() const {
  return block_ && block_->reservation ? block_->reservation->size_bytes() : 0;
}

void Buffer::shrink(size_t size) {
  if (size < size_) size_ = size;
}

BufferPool::BufferPool(size_t cap_bytes, std::shared_ptr<MemoryCap> counted)
    : cap_bytes_(cap_bytes), counted_(std::move(counted)) {}

BufferPool::~BufferPool() { trim(); }

void BufferPool::trim() noexcept {
  std::vector<Block> evicted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    evicted.swap(free_);
    change_free(-static_cast<int64_t>(free_bytes_));
  }
  for (const Block& block : evicted) std::free(block.data);
}

void BufferPool::change_free(int64_t by) noexcept {
  free_bytes_ += static_cast<size_t>(by);
  if (counted_) counted_->add_spare(by);
}

uint8_t* BufferPool::take(size_t size, size_t* capacity) {
  if (size > kLargest) throw std::bad_alloc();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t best = free_.size();
    for (size_t i = 0; i < free_.size(); ++i) {
      // More than twice the size would tie up memory that a large frame needs soon.
      if (free_[i].capacity < size || free_[i].capacity / 2 > size) continue;
      if (best == free_.size() || free_[i].capacity < free_[best].capacity) best = i;
    }
    if (best < free_.size()) {
      const Block block = free_[best];
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
      change_free(-static_cast<int64_t>(block.capacity));
      *capacity = block.capacity;
      return block.data;
    }
  }
  // Messages of a kind differ a little in size: the next one is to fit, without new page faults.
  *capacity = round_up(size >= kRoomBytesMin ? size + size / 8 : size, kPage);
  return allocate(*capacity);
}

void BufferPool::give_back(uint8_t* block, size_t capacity) noexcept {
  std::vector<Block> evicted;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (capacity <= cap_bytes_ && (!counted_ || counted_->has_room(capacity))) {
      // Reserved first: nothing may throw once blocks have changed hands.
      free_.reserve(free_.size() + 1);
      evicted.reserve(free_.size());
      // The oldest go first, so that the list follows a change of frame sizes.
      size_t count = 0;
      while (free_bytes_ + capacity > cap_bytes_) {
        change_free(-static_cast<int64_t>(free_[count].capacity));
        evicted.push_back(free_[count++]);
      }
      free_.erase(free_.begin(), free_.begin() + static_cast<std::ptrdiff_t>(count));
      free_.push_back({block, capacity});
      change_free(static_cast<int64_t>(capacity));
      block = nullptr;
    }
  } catch (const std::exception&) {
    // Out of memory for the list itself: the block is simply freed below.
  }
  std::free(block);
  for (const Block& old : evicted) std::free(old.data);
}

}  // namespace cpudist
