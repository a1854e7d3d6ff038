// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The index of a table's rows on one server: key -> record number, as many small tables of 8-byte
// slots, each for a run of buckets. One grows at a time, so that no insertion waits for a copy of
// the whole index. A slot has no key: the record has it, which whoever looks a row up reads anyway.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/hash.h"

namespace cpudist::table {

// Thread safety: any number of readers, or one writer.
class RowIndex {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;

  // `rows`: how many all servers together will hold, as far as is known; only speed hangs on it.
  explicit RowIndex(uint64_t rows);

  // The record of the row whose hash is given and for which is_key(record) holds; kNone if there
  // is none. `is_key` is asked for records that probably are the one.
  template <typename IsKey>
  uint32_t find(uint64_t hash, const IsKey& is_key) const {
    const Part& part = parts_[part_of(hash)];
    if (part.slots == nullptr) return kNone;
    const auto tag = static_cast<uint32_t>(hash >> 32);
    for (uint32_t at = part.home(tag);; at = (at + 1) & part.mask) {
      const Slot& slot = part.slots[at];
      if (slot.record_plus_one == 0) return kNone;
      if (slot.tag == tag && is_key(slot.record_plus_one - 1)) return slot.record_plus_one - 1;
    }
  }

  // The record that find() would ask about first, kNone if there is none.
  uint32_t guess(uint64_t hash) const {
    return find(hash, [](uint32_t) { return true; });
  }

  void prefetch(uint64_t hash) const {
    const Part& part = parts_[part_of(hash)];
    __builtin_prefetch(part.slots.get() + part.home(static_cast<uint32_t>(hash >> 32)));
  }

  // There must be none for the key of this hash; record < kNone. Throws std::bad_alloc, and the
  // index is as it was.
  void insert(uint64_t hash, uint32_t record);

  // Room for so many more, whose hashes these are: inserting them does not throw then. Throws
  // std::bad_alloc, and finds what it found.
  void reserve(std::span<const uint64_t> hashes);
  // Makes room for so many rows, all of these buckets, where there is none yet. Throws
  // std::bad_alloc, and the index finds what it found.
  void reserve(uint64_t first_bucket, uint64_t bucket_count, uint64_t rows);

  size_t size_bytes() const { return parts_.size() * sizeof(Part) + slot_count_ * sizeof(Slot); }

 private:
  struct Slot {
    uint32_t tag;              // the high half of the hash
    uint32_t record_plus_one;  // 0 = empty
  };
  struct Free {
    void operator()(Slot* slots) const noexcept;
  };
  using Slots = std::unique_ptr<Slot[], Free>;

  // Open addressing with linear probing over a power of two of slots, in the order of the tags.
  struct Part {
    Slots slots;
    uint32_t mask = 0;  // slots - 1
    uint32_t rows = 0;

    uint32_t home(uint32_t tag) const {
      return static_cast<uint32_t>((uint64_t{tag} * (uint64_t{mask} + 1)) >> 32);
    }
    void place(uint32_t tag, uint32_t record_plus_one);
  };

  static Slots allocate(size_t count);
  size_t part_of(uint64_t hash) const { return (hash % kernels::kBucketCount) >> bucket_bits_; }
  bool has_room(size_t part, uint64_t more) const;
  static bool too_many(size_t part, uint64_t rows, uint64_t slots);
  void grow(Part& part);

  int bucket_bits_;  // of the buckets that one part is for
  std::vector<Part> parts_;
  size_t slot_count_ = 0;
};

}  // namespace cpudist::table
