// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// 64-byte aligned bytes of frame payloads, copied by nobody on their way. Large blocks go back to a
// pool (BufferPool) because fresh pages cost more than the copy into them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace cpudist {

class BufferPool;

// Counts the bytes of live buffers that were reserved under it. Thread-safe.
class MemoryCap : public std::enable_shared_from_this<MemoryCap> {
 public:
  explicit MemoryCap(uint64_t cap_bytes) : cap_bytes_(cap_bytes) {}

  // Gives its bytes back when it goes.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(std::shared_ptr<MemoryCap> cap, uint64_t size_bytes)
        : cap_(std::move(cap)), size_bytes_(size_bytes) {}
    Reservation(Reservation&&) noexcept = default;
    Reservation& operator=(Reservation&&) = delete;
    ~Reservation() {
      if (cap_) cap_->used_.fetch_sub(size_bytes_);
    }

   private:
    std::shared_ptr<MemoryCap> cap_;
    uint64_t size_bytes_ = 0;
  };
  // Nothing when the cap would be exceeded, except for the only bytes besides `waiting_bytes`: what
  // waits may wait for them.
  std::optional<Reservation> reserve(uint64_t size_bytes, uint64_t waiting_bytes);
  uint64_t used_bytes() const { return used_.load(); }

 private:
  const uint64_t cap_bytes_;
  std::atomic<uint64_t> used_{0};
};

// A handle to a block of bytes. Whoever makes a buffer fills it; once it is shared, nobody may
// change the bytes any more.
class Buffer {
 public:
  Buffer() = default;
  // Uninitialised memory of `size` bytes, 64-byte aligned.
  explicit Buffer(size_t size, std::shared_ptr<BufferPool> pool = nullptr,
                  MemoryCap::Reservation reservation = {});
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() = default;

  Buffer share() const;  // a second handle to the same bytes; they live as long as one of the two
  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<const uint8_t> bytes() const { return {data_, size_}; }
  bool empty() const { return size_ == 0; }
  void shrink(size_t size);  // size <= size(); keeps the memory

 private:
  struct Block;  // the memory, given back to its pool with the last handle
  std::shared_ptr<Block> block_;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Free list of large blocks, at most `cap_bytes` of them. Thread-safe. Owned by a Server or a
// Client.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  explicit BufferPool(size_t cap_bytes);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  // At least `size` bytes; `capacity` receives the real size of the block.
  uint8_t* take(size_t size, size_t* capacity);
  void give_back(uint8_t* block, size_t capacity) noexcept;

 private:
  struct Block {
    uint8_t* data;
    size_t capacity;
  };
  std::mutex mutex_;
  std::vector<Block> free_;
  size_t free_bytes_ = 0;
  size_t cap_bytes_;
};

}  // namespace cpudist
