// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The index of a table's rows on one server: key -> record number, as many small tables of 8-byte
// slots, each for a run of buckets. One grows at a time, so that no insertion waits for a copy of
// the whole index. A slot has no key: the record has it, which whoever looks a row up reads anyway.
#pragma once

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/aligned.h"
#include "kernels/hash.h"
#include "table/slot_memory.h"

namespace cpudist::table {

// Thread safety: any number of readers, or one writer.
class RowIndex {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;

  // `rows`: how many all servers together will hold, as far as is known; only speed hangs on it.
  explicit RowIndex(uint64_t rows);
  ~RowIndex();
  RowIndex(RowIndex&&) = default;
  RowIndex(const RowIndex&) = delete;
  RowIndex& operator=(const RowIndex&) = delete;

  // The record of the row whose hash is given and for which is_key(record) holds; kNone if there
  // is none. `is_key` is asked for records that probably are the one.
  template <typename IsKey>
  uint32_t find(uint64_t hash, const IsKey& is_key) const {
    const Part& part = parts_[part_of(hash)];
    if (part.slots == nullptr) return kNone;
    const auto tag = static_cast<uint32_t>(hash >> 32);
    for (uint32_t at = part.home(tag);; at = (at + kLineSlots) & part.mask) {
      const Slot* const line = part.slots + at;
      const Line found = look_at(line, tag);
      for (uint32_t same = found.same; same != 0; same &= same - 1) {
        const uint32_t record = line[std::countr_zero(same)].record_plus_one - 1;
        if (is_key(record)) return record;
      }
      if (found.empty != 0) return kNone;
    }
  }

  // The record that find() would ask about first, kNone if there is none.
  uint32_t guess(uint64_t hash) const {
    return find(hash, [](uint32_t) { return true; });
  }

  void prefetch(uint64_t hash) const {
    const Part& part = parts_[part_of(hash)];
    __builtin_prefetch(part.slots + part.home(static_cast<uint32_t>(hash >> 32)));
  }

  // There must be none for the key of this hash; record < kNone. Throws std::bad_alloc, and the
  // index is as it was.
  void insert(uint64_t hash, uint32_t record);

  // `record` must be there, for the key of this hash.
  void erase(uint64_t hash, uint32_t record);

  // Room for so many more, whose hashes these are: inserting them does not throw then. Throws
  // std::bad_alloc, and finds what it found.
  void reserve(std::span<const uint64_t> hashes);
  // Makes room for so many rows, all of these buckets, where there is none yet. Throws
  // std::bad_alloc, and the index finds what it found.
  void reserve(uint64_t first_bucket, uint64_t bucket_count, uint64_t rows);

  // Of no row, with the memory it has.
  void clear();
  // What reserving may take: what it adds to size_bytes(), and parts that give theirs back.
  uint64_t growth_bytes(std::span<const uint64_t> hashes) const;
  uint64_t growth_bytes(uint64_t first_bucket, uint64_t bucket_count, uint64_t rows) const;

  size_t size_bytes() const {
    return parts_.size() * sizeof(Part) + slot_count_ * sizeof(Slot) + memory_.spare_bytes();
  }

 private:
  struct Slot {
    uint32_t tag;              // the high half of the hash
    uint32_t record_plus_one;  // 0 = empty
  };
  static constexpr uint32_t kLineSlots = 8;  // of a cache line
  static_assert(kLineSlots * sizeof(Slot) == kernels::kCacheLineBytes);

  // Slots of a line, a bit each: those with a record under a tag, and those without one.
  struct Line {
    uint32_t same;
    uint32_t empty;
  };

  // Open addressing over a power of two of slots, in the order of the tags: a record stands in the
  // first slot that is empty, from the beginning of the line of its tag on. So a lookup reads one
  // line, most times, and looks at all of its slots at once.
  struct Part {
    Slot* slots = nullptr;
    uint32_t mask = 0;  // slots - 1
    uint32_t rows = 0;

    uint32_t home(uint32_t tag) const {
      return static_cast<uint32_t>((uint64_t{tag} * (uint64_t{mask} + 1)) >> 32) &
             ~(kLineSlots - 1);
    }
    uint64_t size() const { return slots == nullptr ? 0 : uint64_t{mask} + 1; }
    void place(uint32_t tag, uint32_t record_plus_one);
    // The slot of a record that is there.
    uint32_t slot_of(uint32_t tag, uint32_t record_plus_one) const;
    // A slot of this line whose record would be found in `hole` just as well; kNone if there is
    // none. All lines between them are full.
    uint32_t movable(uint32_t line, uint32_t hole) const;
  };

  static Line look_at(const Slot* line, uint32_t tag);
  Slot* allocate(size_t count);
  size_t part_of(uint64_t hash) const { return (hash % kernels::kBucketCount) >> bucket_bits_; }
  bool has_room(size_t part, uint64_t more) const;
  static bool too_many(size_t part, uint64_t rows, uint64_t slots);
  // Slots of a part for this share of `rows`, which have `bucket_count` buckets; 0 where there are
  // some already, or no bucket is the part's.
  size_t slots_for(size_t part, uint64_t first_bucket, uint64_t bucket_count, uint64_t rows) const;
  struct Wanted {  // bytes
    size_t alone = 0;
    size_t in_chunks = 0;
  };
  void add_to(Wanted& wanted, uint64_t slots) const;
  std::vector<uint32_t> rows_of_parts(std::span<const uint64_t> hashes) const;
  void grow(Part& part);

  int bucket_bits_;  // of the buckets that one part is for
  std::vector<Part> parts_;
  size_t slot_count_ = 0;
  SlotMemory memory_;
};

inline RowIndex::Line RowIndex::look_at(const Slot* line, uint32_t tag) {
  Line found{0, 0};
#if defined(__x86_64__)
  const __m128i wanted = _mm_set1_epi32(static_cast<int>(tag));
  for (uint32_t at = 0; at < kLineSlots; at += 4) {
    const __m128 low = _mm_load_ps(reinterpret_cast<const float*>(line + at));
    const __m128 high = _mm_load_ps(reinterpret_cast<const float*>(line + at + 2));
    const __m128i tags = _mm_castps_si128(_mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0)));
    const __m128i records = _mm_castps_si128(_mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1)));
    const __m128i same = _mm_cmpeq_epi32(tags, wanted);
    const __m128i empty = _mm_cmpeq_epi32(records, _mm_setzero_si128());
    found.same |= static_cast<uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(same))) << at;
    found.empty |= static_cast<uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(empty))) << at;
  }
#else
  for (uint32_t at = 0; at < kLineSlots; ++at) {
    found.same |= static_cast<uint32_t>(line[at].tag == tag) << at;
    found.empty |= static_cast<uint32_t>(line[at].record_plus_one == 0) << at;
  }
#endif
  found.same &= ~found.empty;
  return found;
}

}  // namespace cpudist::table
