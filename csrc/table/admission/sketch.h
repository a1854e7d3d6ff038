// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How often keys were counted, in memory that does not grow with them. Each key has two counters of
// four bits in one cache line, which other keys may share: what is said of a key is the smaller of
// them, which is never less than how often it was counted, until counters are halved. So that old
// keys make room for new ones, that begins after 2 * size_bytes() additions: from then on each line
// is halved once in as many additions, one at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/aligned.h"

namespace cpudist::table {

// Thread safety: const members from any number of threads; the others exclusively.
class KeySketch {
 public:
  static constexpr uint32_t kMost = 15;

  // `size_bytes` is a multiple of 64, and not 0. Throws std::bad_alloc.
  explicit KeySketch(uint64_t size_bytes);

  uint64_t size_bytes() const { return words_.size() * sizeof(uint64_t); }
  // Keys are told by a hash, all of whose bits count.
  void prefetch(uint64_t hash) const { __builtin_prefetch(line_of(hash)); }
  uint32_t count(uint64_t hash) const;
  // `times` more, kMost in all.
  void add(uint64_t hash, uint32_t times) noexcept;
  // As if the key had never been counted. Another key that shares a counter with it may be counted
  // less, too.
  void forget(uint64_t hash) noexcept;
  void clear() noexcept;

 private:
  static constexpr size_t kLineWords = kernels::kCacheLineBytes / sizeof(uint64_t);
  static constexpr uint32_t kWordCounters = 16;
  static constexpr uint32_t kHalfCounters = kLineWords / 2 * kWordCounters;

  // The high bits choose the line, low ones a counter in each half of it.
  size_t line_number(uint64_t hash) const {
    __extension__ using uint128 = unsigned __int128;
    return static_cast<size_t>((uint128{hash} * lines_) >> 64);
  }
  const uint64_t* line_of(uint64_t hash) const {
    return words_.data() + line_number(hash) * kLineWords;
  }
  uint64_t* line_of(uint64_t hash) { return words_.data() + line_number(hash) * kLineWords; }
  static uint32_t first_of(uint64_t hash) { return hash % kHalfCounters; }
  static uint32_t second_of(uint64_t hash) {
    return kHalfCounters + hash / kHalfCounters % kHalfCounters;
  }
  static uint32_t read(const uint64_t* line, uint32_t counter) {
    return (line[counter / kWordCounters] >> (counter % kWordCounters * 4)) & 15u;
  }
  static void write(uint64_t* line, uint32_t counter, uint32_t value);
  void age(uint64_t additions) noexcept;

  const uint64_t lines_;
  kernels::AlignedBuffer<uint64_t> words_;
  uint64_t additions_ = 0;
  uint64_t halved_ = 0;  // lines, ever
};

}  // namespace cpudist::table
