// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// 64-byte aligned bytes of frame payloads, copied by nobody on their way. Large blocks go back to a
// pool (BufferPool) because fresh pages cost more than the copy into them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/memory_cap.h"

namespace cpudist {

class BufferPool;

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
  uint64_t reserved_bytes() const;  // under a cap, for the whole memory
  void shrink(size_t size);         // size <= size(); keeps the memory

 private:
  struct Block;  // the memory, given back to its pool with the last handle
  std::shared_ptr<Block> block_;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Free list of large blocks, at most `cap_bytes` of them, and what `counted` has room for; they are
// its spare bytes. Thread-safe. Owned by a Server or a Client.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  explicit BufferPool(size_t cap_bytes, std::shared_ptr<MemoryCap> counted = nullptr);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  // At least `size` bytes; `capacity` receives the real size of the block.
  uint8_t* take(size_t size, size_t* capacity);
  void give_back(uint8_t* block, size_t capacity) noexcept;
  void trim() noexcept;  // frees what is on the list

 private:
  struct Block {
    uint8_t* data;
    size_t capacity;
  };
  void change_free(int64_t by) noexcept;  // with the lock held

  std::mutex mutex_;
  std::vector<Block> free_;
  size_t free_bytes_ = 0;
  size_t cap_bytes_;
  const std::shared_ptr<MemoryCap> counted_;
};

}  // namespace cpudist
