// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Memory aligned to cache lines, on huge pages where the kernel grants them: row slabs and large
// flat buffers are read at random, and a page walk per row costs more than the row.

#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>

namespace cpudist::kernels {

constexpr size_t kCacheLineBytes = 64;

// Zero-filled; throws std::bad_alloc. Free it with free_aligned.
void* allocate_aligned(size_t size_bytes);
void free_aligned(void* memory) noexcept;
// Asks the kernel to put memory of the caller's, if there is much of it, on huge pages. Copies it
// once, about 1 GB/s; changes no value and cannot fail.
void prefer_huge_pages(void* memory, size_t size_bytes) noexcept;

// A fixed-length owned array of a trivial type, zero-filled at construction.
template <typename T>
class AlignedBuffer {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t size)
      : data_(size == 0 ? nullptr : static_cast<T*>(allocate_aligned(size_bytes(size)))),
        size_(size) {}

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t i) { return data_.get()[i]; }
  const T& operator[](size_t i) const { return data_.get()[i]; }
  std::span<T> span() { return {data_.get(), size_}; }
  std::span<const T> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(T* memory) const noexcept { free_aligned(memory); }
  };
  static size_t size_bytes(size_t size);

  std::unique_ptr<T[], Free> data_;
  size_t size_ = 0;
};

size_t checked_size_bytes(size_t count, size_t element_bytes);

template <typename T>
size_t AlignedBuffer<T>::size_bytes(size_t size) {
  return checked_size_bytes(size, sizeof(T));
}

}  // namespace cpudist::kernels
