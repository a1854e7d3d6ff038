// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Deduplication of a batch's keys and the sum of the gradient rows that share one.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cpudist::kernels {

// Finds the distinct keys of a batch. The object keeps its hash table between calls, so one per
// thread in steady state allocates nothing. Not thread safe.
class KeyDeduper {
 public:
  // Writes the distinct keys in the order of their first occurrence to unique (room for n) and
  // for every i the position of keys[i] in unique to inverse[i]; returns how many there are.
  // Throws std::length_error for n >= 2^31.
  size_t run(const int64_t* keys, size_t n, int64_t* unique, uint32_t* inverse);
  size_t run(const int32_t* keys, size_t n, int64_t* unique, uint32_t* inverse);
  // So that runs of up to n keys need no memory.
  void reserve(size_t n);

 private:
  struct Slot {
    int64_t key;
    uint32_t generation;  // the slot is empty unless this is the current generation
    uint32_t position;
  };

  template <typename Key>
  size_t run_impl(const Key* keys, size_t n, int64_t* unique, uint32_t* inverse);
  void begin(size_t n);

  std::vector<Slot> slots_;
  uint64_t mask_ = 0;
  uint32_t generation_ = 0;
};

// segment_sum family: rows is n rows of dim elements, row i at rows + i * row_stride (elements).
// Rows with the same inverse[i] are added in the order of i, beginning with a copy of the first.

// inverse must come from KeyDeduper (first occurrences number 0, 1, 2, ... in order).
// out is [unique, dim] contiguous and need not be initialised.
template <typename T>
void segment_sum(const T* rows, size_t row_stride, size_t n, size_t dim, const uint32_t* inverse,
                 T* out);

// As above, the sum of unique key u goes to destinations[u]: the client sums straight into the
// send buffers of several servers. Destinations need only the alignment of T.
template <typename T>
void segment_sum_to(const T* rows, size_t row_stride, size_t n, size_t dim, const uint32_t* inverse,
                    T* const* destinations);

// As segment_sum for any inverse with values below count; segments without a row become zero.
template <typename T>
void segment_sum_any(const T* rows, size_t row_stride, size_t n, size_t dim, const int64_t* inverse,
                     size_t count, T* out);

}  // namespace cpudist::kernels
