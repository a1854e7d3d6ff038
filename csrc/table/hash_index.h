// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The index of one table shard: key -> record number. Open addressing with linear probing over a
// power of two of 16-byte slots, at most 60 % full. Nothing is ever removed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/aligned.h"
#include "kernels/hash.h"

namespace cpudist::table {

// Thread safety: any number of readers, or one writer.
class HashIndex {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;

  explicit HashIndex(uint64_t salt) : salt_(salt) { allocate(kInitialSlots); }

  // The hash of a key, of which the low bits name its bucket and the high bits its slot.
  static uint64_t hash(int64_t key, uint64_t salt) {
    return kernels::mix64(static_cast<uint64_t>(key) ^ salt);
  }

  uint32_t find(int64_t key, uint64_t hash) const {
    for (uint64_t at = hash >> shift_;; at = (at + 1) & mask_) {
      const Slot& slot = slots_[at];
      if (slot.record_plus_one == 0) return kNone;
      if (slot.key == key) return slot.record_plus_one - 1;
    }
  }

  void prefetch(uint64_t hash) const { __builtin_prefetch(&slots_[hash >> shift_]); }

  // The key must be absent; record < kNone.
  void insert(int64_t key, uint64_t hash, uint32_t record) {
    if ((size_ + 1) * 5 > slots_.size() * 3) grow();
    place(key, hash, record + 1);
    ++size_;
  }

  size_t size() const { return size_; }
  size_t size_bytes() const { return slots_.size() * sizeof(Slot); }

 private:
  struct Slot {
    int64_t key;
    uint32_t record_plus_one;  // 0 = empty, so that zeroed memory is an empty index
    uint32_t unused;
  };
  static constexpr size_t kInitialSlots = 16;

  void allocate(size_t slots) {
    slots_ = kernels::AlignedBuffer<Slot>(slots);
    measure();
  }

  void measure() {
    mask_ = slots_.size() - 1;
    shift_ = 64 - std::countr_zero(slots_.size());
  }

  void place(int64_t key, uint64_t hash, uint32_t record_plus_one) {
    uint64_t at = hash >> shift_;
    while (slots_[at].record_plus_one != 0) at = (at + 1) & mask_;
    slots_[at] = Slot{key, record_plus_one, 0};
  }

  void grow() {
    // Made first: when memory runs out the index stays as it was.
    kernels::AlignedBuffer<Slot> larger(slots_.size() * 2);
    const kernels::AlignedBuffer<Slot> old = std::exchange(slots_, std::move(larger));
    measure();
    for (const Slot& slot : old.span()) {
      if (slot.record_plus_one == 0) continue;
      place(slot.key, hash(slot.key, salt_), slot.record_plus_one);
    }
  }

  uint64_t salt_;
  kernels::AlignedBuffer<Slot> slots_;
  uint64_t mask_ = 0;
  int shift_ = 0;
  size_t size_ = 0;
};

}  // namespace cpudist::table
