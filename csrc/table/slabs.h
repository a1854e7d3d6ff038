// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The memory of a table's records: slabs with stable addresses, numbered through. The next one is
// made ahead, when the last one is half full.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/memory_cap.h"
#include "table/ahead.h"

namespace cpudist::table {

// Thread safety: at() and size_bytes() from any number of threads; the others exclusively.
class Slabs {
 public:
  // `likely`: records that will probably be all, beyond which nothing is made ahead. Without
  // `ahead` every slab is made when it is needed. `kept` counts the slabs, outlives them, and says
  // whether there is room for one that is made ahead.
  Slabs(uint64_t stride, uint64_t likely, std::shared_ptr<MemoryAhead> ahead,
        MemoryCap::Kept* kept);

  uint64_t stride() const { return stride_; }
  uint32_t per_slab() const { return per_slab_; }
  size_t size() const { return slabs_.size(); }
  uint8_t* at(uint32_t record) const {
    __extension__ using uint128 = unsigned __int128;
    const auto slab = static_cast<uint32_t>((uint128{reciprocal_} * record) >> 64);
    return starts_[slab] + uint64_t{record - slab * per_slab_} * stride_;
  }

  // Room for records 0 .. record. Throws std::bad_alloc, and what was there stays.
  void cover(uint64_t record) {
    if (record >= order_at_ || record >= covered_) extend(record);
  }
  // So many records there will be soon, in all.
  void expect(uint64_t records) { order_up_to((records + per_slab_ - 1) / per_slab_); }

  // Nothing is made ahead until somebody expects it, or the last slab is half full. Returns the
  // bytes that this frees.
  uint64_t give_up_ahead() noexcept;

  // With what is made ahead.
  uint64_t size_bytes() const { return (slabs_.size() + orders_.size()) * slab_bytes(); }
  // What room for so many records takes in all.
  uint64_t bytes_for(uint64_t records) const {
    return (records + per_slab_ - 1) / per_slab_ * slab_bytes();
  }

 private:
  uint64_t slab_bytes() const { return per_slab_ * stride_; }
  void extend(uint64_t record);
  void order_up_to(uint64_t slabs);  // in all, as many as are likely to be needed

  const uint64_t stride_;      // bytes per record
  const uint32_t per_slab_;    // records, at least 2
  const uint64_t reciprocal_;  // 2^64 / per_slab, rounded up: exact for 32-bit dividends
  const uint64_t likely_slabs_;
  const std::shared_ptr<MemoryAhead> ahead_;
  MemoryCap::Kept* const kept_;
  std::vector<MemoryAhead::Memory> slabs_;
  std::vector<uint8_t*> starts_;
  std::deque<MemoryAhead::OrderPtr> orders_;  // of the slabs to come
  uint64_t covered_ = 0;                      // records that the slabs have room for
  uint64_t order_at_ = 0;                     // the record that makes the last slab half full
};

}  // namespace cpudist::table
