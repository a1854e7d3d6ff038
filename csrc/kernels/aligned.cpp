// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Aligned allocation with huge-page advice.

#include "kernels/aligned.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

namespace cpudist::kernels {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which older C libraries do not name

}  // namespace

void* allocate_aligned(size_t size_bytes) {
  const bool huge = size_bytes >= kHugePageBytes;
  const size_t alignment = huge ? kHugePageBytes : kCacheLineBytes;
  if (size_bytes > std::numeric_limits<size_t>::max() - alignment) throw std::bad_alloc();
  const size_t rounded = (size_bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  // Advice only: a kernel without transparent huge pages leaves the memory usable as it is.
  if (huge) static_cast<void>(madvise(memory, rounded, MADV_HUGEPAGE));
#endif
  std::memset(memory, 0, size_bytes);
  return memory;
}

void prefer_huge_pages(void* memory, size_t size_bytes) noexcept {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t last = (begin + size_bytes) / kHugePageBytes * kHugePageBytes;
  if (first >= last) return;
#if defined(MADV_HUGEPAGE)
  // Both are refused for memory that is not the process's own, and by older kernels.
  void* const start = reinterpret_cast<void*>(first);
  if (madvise(start, last - first, MADV_HUGEPAGE) != 0) return;
  static_cast<void>(madvise(start, last - first, kCollapse));
#endif
}

void free_aligned(void* memory) noexcept { std::free(memory); }

size_t checked_size_bytes(size_t count, size_t element_bytes) {
  if (element_bytes != 0 && count > std::numeric_limits<size_t>::max() / element_bytes) {
    throw std::bad_alloc();
  }
  return count * element_bytes;
}

}  // namespace cpudist::kernels
