// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Row copies with prefetch. Common row sizes get a copy of fixed length, which the compiler turns
// into a few vector moves; a library call per row would cost more than the row.

#include "kernels/gather_scatter.h"

#include <algorithm>
#include <cstring>

namespace cpudist::kernels {
namespace {

constexpr size_t kPrefetchRows = 16;
constexpr size_t kLineBytes = 64;

template <bool kRead>
inline void prefetch_row(const char* row, size_t row_bytes) {
  for (size_t at = 0; at < row_bytes; at += kLineBytes) __builtin_prefetch(row + at, kRead ? 0 : 1);
}

// kFixedBytes = 0 copies row_bytes. Only the scattered side is prefetched: the processor sees the
// other coming by itself.
template <size_t kFixedBytes, bool kGather, typename Source, typename Target>
void copy_rows(size_t n, size_t row_bytes, Source source, Target target) {
  for (size_t i = 0; i < n; ++i) {
    if (i + kPrefetchRows < n) {
      prefetch_row<kGather>(kGather ? source(i + kPrefetchRows) : target(i + kPrefetchRows),
                            row_bytes);
    }
    std::memcpy(target(i), source(i), kFixedBytes == 0 ? row_bytes : kFixedBytes);
  }
}

template <bool kGather, typename Source, typename Target>
void copy_rows_any(size_t n, size_t row_bytes, Source source, Target target) {
  if (row_bytes == 0) return;
  switch (row_bytes) {
    case 4:
      return copy_rows<4, kGather>(n, row_bytes, source, target);
    case 16:
      return copy_rows<16, kGather>(n, row_bytes, source, target);
    case 32:
      return copy_rows<32, kGather>(n, row_bytes, source, target);
    case 64:
      return copy_rows<64, kGather>(n, row_bytes, source, target);
    case 128:
      return copy_rows<128, kGather>(n, row_bytes, source, target);
    default:
      return copy_rows<0, kGather>(n, row_bytes, source, target);
  }
}

}  // namespace

template <typename Index>
void gather_rows(const void* source, size_t source_stride_bytes, const Index* index, size_t n,
                 size_t row_bytes, void* out, size_t out_stride_bytes) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(out);
  copy_rows_any<true>(
      n, row_bytes,
      [=](size_t i) { return from + static_cast<size_t>(index[i]) * source_stride_bytes; },
      [=](size_t i) { return to + i * out_stride_bytes; });
}

template <typename Index>
void scatter_rows(void* target, size_t target_stride_bytes, const Index* index, size_t n,
                  size_t row_bytes, const void* source, size_t source_stride_bytes) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(target);
  copy_rows_any<false>(
      n, row_bytes, [=](size_t i) { return from + i * source_stride_bytes; },
      [=](size_t i) { return to + static_cast<size_t>(index[i]) * target_stride_bytes; });
}

void gather_pointers(const void* const* rows, size_t n, size_t row_bytes, void* out,
                     size_t out_stride_bytes) {
  char* to = static_cast<char*>(out);
  copy_rows_any<true>(
      n, row_bytes, [=](size_t i) { return static_cast<const char*>(rows[i]); },
      [=](size_t i) { return to + i * out_stride_bytes; });
}

void scatter_pointers(void* const* rows, const uint32_t* index, size_t n, size_t row_bytes,
                      const void* source, size_t source_stride_bytes) {
  const char* from = static_cast<const char*>(source);
  copy_rows_any<false>(
      n, row_bytes, [=](size_t i) { return from + i * source_stride_bytes; },
      [=](size_t i) { return static_cast<char*>(rows[index[i]]); });
}

size_t find_out_of_range(const int64_t* index, size_t n, int64_t rows) {
  const uint64_t limit = rows < 0 ? 0 : static_cast<uint64_t>(rows);
  constexpr size_t kBlock = 256;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t end = std::min(n, begin + kBlock);
    uint64_t outside = 0;  // no branch per index: the common answer is that all are inside
    for (size_t i = begin; i < end; ++i) outside |= static_cast<uint64_t>(index[i]) >= limit;
    if (outside == 0) continue;
    for (size_t i = begin; i < end; ++i) {
      if (static_cast<uint64_t>(index[i]) >= limit) return i;
    }
  }
  return n;
}

template void gather_rows(const void*, size_t, const int64_t*, size_t, size_t, void*, size_t);
template void gather_rows(const void*, size_t, const uint32_t*, size_t, size_t, void*, size_t);
template void scatter_rows(void*, size_t, const int64_t*, size_t, size_t, const void*, size_t);
template void scatter_rows(void*, size_t, const uint32_t*, size_t, size_t, const void*, size_t);

}  // namespace cpudist::kernels
