// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Key deduplication with an open-addressing table, and dispatch of the segment sums.

#include "kernels/dedupe.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "kernels/hash.h"
#include "kernels/levels/table.h"

namespace cpudist::kernels {
namespace {

constexpr size_t kMinSlots = 64;
// Hashes computed and slots prefetched ahead of the probes.
constexpr size_t kBatch = 32;

size_t slots_for(size_t n) { return std::max(kMinSlots, std::bit_ceil(n * 2)); }

}  // namespace

void KeyDeduper::reserve(size_t n) {
  if (n >= (size_t{1} << 31)) {
    throw std::length_error("KeyDeduper: a batch holds at most 2^31 - 1 keys; split it");
  }
  const size_t wanted = slots_for(n);
  if (slots_.size() >= wanted) return;
  slots_.assign(wanted, Slot{0, 0, 0});
  generation_ = 0;
}

void KeyDeduper::begin(size_t n) {
  reserve(n);
  // A small batch after a large one uses the front of the table only, which stays in cache.
  mask_ = slots_for(n) - 1;
  if (++generation_ == 0) {
    std::fill(slots_.begin(), slots_.end(), Slot{0, 0, 0});
    generation_ = 1;
  }
}

template <typename Key>
size_t KeyDeduper::run_impl(const Key* keys, size_t n, int64_t* unique, uint32_t* inverse) {
  begin(n);
  Slot* const slots = slots_.data();
  const uint64_t mask = mask_;
  const uint32_t generation = generation_;
  uint32_t count = 0;
  uint64_t homes[kBatch];
  for (size_t begin = 0; begin < n; begin += kBatch) {
    const size_t size = std::min(kBatch, n - begin);
    for (size_t j = 0; j < size; ++j) {
      homes[j] = mix64(static_cast<uint64_t>(static_cast<int64_t>(keys[begin + j]))) & mask;
      __builtin_prefetch(slots + homes[j], 1);
    }
    for (size_t j = 0; j < size; ++j) {
      const int64_t key = static_cast<int64_t>(keys[begin + j]);
      uint64_t at = homes[j];
      while (slots[at].generation == generation && slots[at].key != key) at = (at + 1) & mask;
      if (slots[at].generation != generation) {
        slots[at] = {key, generation, count};
        unique[count] = key;
        ++count;
      }
      inverse[begin + j] = slots[at].position;
    }
  }
  return count;
}

size_t KeyDeduper::run(const int64_t* keys, size_t n, int64_t* unique, uint32_t* inverse) {
  return run_impl(keys, n, unique, inverse);
}

size_t KeyDeduper::run(const int32_t* keys, size_t n, int64_t* unique, uint32_t* inverse) {
  return run_impl(keys, n, unique, inverse);
}

template <typename T>
void segment_sum(const T* rows, size_t row_stride, size_t n, size_t dim, const uint32_t* inverse,
                 T* out) {
  typed_kernels<T>().segment_sum(rows, row_stride, n, dim, inverse, out);
}

template <typename T>
void segment_sum_to(const T* rows, size_t row_stride, size_t n, size_t dim, const uint32_t* inverse,
                    T* const* destinations) {
  typed_kernels<T>().segment_sum_to(rows, row_stride, n, dim, inverse, destinations);
}

template <typename T>
void segment_sum_any(const T* rows, size_t row_stride, size_t n, size_t dim, const int64_t* inverse,
                     size_t count, T* out) {
  std::fill(out, out + count * dim, T(0));
  typed_kernels<T>().segment_sum_any(rows, row_stride, n, dim, inverse, out);
}

template void segment_sum(const float*, size_t, size_t, size_t, const uint32_t*, float*);
template void segment_sum(const double*, size_t, size_t, size_t, const uint32_t*, double*);
template void segment_sum_to(const float*, size_t, size_t, size_t, const uint32_t*, float* const*);
template void segment_sum_to(const double*, size_t, size_t, size_t, const uint32_t*,
                             double* const*);
template void segment_sum_any(const float*, size_t, size_t, size_t, const int64_t*, size_t, float*);
template void segment_sum_any(const double*, size_t, size_t, size_t, const int64_t*, size_t,
                              double*);

}  // namespace cpudist::kernels
