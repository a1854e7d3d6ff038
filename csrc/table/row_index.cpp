// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/row_index.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/aligned.h"

namespace cpudist::table {
namespace {

// Copying this many slots takes a tenth of a millisecond.
constexpr uint64_t kRowsPerPart = 4096;
constexpr uint64_t kLeastParts = 16;
constexpr size_t kFirstSlots = 8;  // a cache line
// A part is full when this share of its slots is, in 256ths: from 70 to 85 %, another for each, so
// that parts that fill evenly do not all grow at once.
constexpr uint64_t kLeastFull = 179;
constexpr uint64_t kFullRange = 39;

// How many parts an index has that is for so many rows.
uint64_t parts_for(uint64_t rows) {
  return std::bit_ceil(
      std::clamp<uint64_t>(rows / kRowsPerPart, kLeastParts, uint64_t{kernels::kBucketCount}));
}

}  // namespace

RowIndex::RowIndex(uint64_t rows)
    : bucket_bits_(std::countr_zero(kernels::kBucketCount / parts_for(rows))),
      parts_(parts_for(rows)),
      memory_(parts_.size()) {}

RowIndex::~RowIndex() {
  for (const Part& part : parts_) memory_.free(part.slots, part.size() * sizeof(Slot));
}

RowIndex::Slot* RowIndex::allocate(size_t count) {
  const size_t size_bytes = kernels::checked_size_bytes(count, sizeof(Slot));
  return static_cast<Slot*>(memory_.allocate(size_bytes));
}

void RowIndex::Part::place(uint32_t tag, uint32_t record_plus_one) {
  uint32_t at = home(tag);
  Line found = look_at(slots + at, tag);
  while (found.empty == 0) {
    at = (at + kLineSlots) & mask;
    found = look_at(slots + at, tag);
  }
  slots[at + static_cast<uint32_t>(std::countr_zero(found.empty))] = Slot{tag, record_plus_one};
}

bool RowIndex::has_room(size_t part, uint64_t more) const {
  const Part& found = parts_[part];
  return found.slots != nullptr && !too_many(part, found.rows + more, uint64_t{found.mask} + 1);
}

bool RowIndex::too_many(size_t part, uint64_t rows, uint64_t slots) {
  return rows * 256 > slots * (kLeastFull + part * 97 % kFullRange);
}

size_t RowIndex::slots_for(size_t part, uint64_t first_bucket, uint64_t bucket_count,
                           uint64_t rows) const {
  const uint64_t begin = std::max(first_bucket, uint64_t{part} << bucket_bits_);
  const uint64_t end = std::min(first_bucket + bucket_count, (uint64_t{part} + 1) << bucket_bits_);
  if (begin >= end || parts_[part].slots != nullptr) return 0;
  const uint64_t likely = rows * (end - begin) / bucket_count;
  size_t slots = kFirstSlots;
  while (too_many(part, likely, slots)) slots *= 2;
  return slots;
}

void RowIndex::reserve(uint64_t first_bucket, uint64_t bucket_count, uint64_t rows) {
  for (size_t at = 0; at < parts_.size(); ++at) {
    const size_t slots = slots_for(at, first_bucket, bucket_count, rows);
    if (slots == 0) continue;
    Part& part = parts_[at];
    part.slots = allocate(slots);
    part.mask = static_cast<uint32_t>(slots - 1);
    slot_count_ += slots;
  }
}

uint64_t RowIndex::growth_bytes(uint64_t first_bucket, uint64_t bucket_count, uint64_t rows) const {
  Wanted wanted;
  for (size_t at = 0; at < parts_.size(); ++at) {
    add_to(wanted, slots_for(at, first_bucket, bucket_count, rows));
  }
  return wanted.alone + memory_.new_chunks_bytes(wanted.in_chunks);
}

void RowIndex::add_to(Wanted& wanted, uint64_t slots) const {
  const size_t size_bytes = slots * sizeof(Slot);
  (memory_.in_chunks(size_bytes) ? wanted.in_chunks : wanted.alone) += size_bytes;
}

void RowIndex::grow(Part& part) {
  const uint64_t before = part.size();
  const uint64_t after = before == 0 ? kFirstSlots : 2 * before;
  // Made first: when memory runs out the index stays as it was.
  Slot* const larger = allocate(after);
  Slot* const smaller = std::exchange(part.slots, larger);
  part.mask = static_cast<uint32_t>(after - 1);
  for (uint64_t at = 0; at < before; ++at) {
    if (smaller[at].record_plus_one != 0) part.place(smaller[at].tag, smaller[at].record_plus_one);
  }
  memory_.free(smaller, before * sizeof(Slot));
  slot_count_ += after - before;
}

void RowIndex::clear() {
  for (Part& part : parts_) {
    if (part.slots == nullptr) continue;
    std::fill_n(part.slots, part.size(), Slot{0, 0});
    part.rows = 0;
  }
}

void RowIndex::insert(uint64_t hash, uint32_t record) {
  const size_t at = part_of(hash);
  Part& part = parts_[at];
  if (!has_room(at, 1)) grow(part);
  part.place(static_cast<uint32_t>(hash >> 32), record + 1);
  ++part.rows;
}

uint32_t RowIndex::Part::slot_of(uint32_t tag, uint32_t record_plus_one) const {
  for (uint32_t at = home(tag);; at = (at + kLineSlots) & mask) {
    for (uint32_t same = look_at(slots + at, tag).same; same != 0; same &= same - 1) {
      const uint32_t slot = at + static_cast<uint32_t>(std::countr_zero(same));
      if (slots[slot].record_plus_one == record_plus_one) return slot;
    }
  }
}

uint32_t RowIndex::Part::movable(uint32_t line, uint32_t hole) const {
  const uint32_t hole_line = hole & ~(kLineSlots - 1);
  for (uint32_t at = line; at < line + kLineSlots; ++at) {
    if (slots[at].record_plus_one == 0) continue;
    if (((line - home(slots[at].tag)) & mask) >= ((line - hole_line) & mask)) return at;
  }
  return kNone;
}

// Whoever looks for a record goes on behind full lines only: where one is not full any more, one of
// those that came behind it because of that moves there.
void RowIndex::erase(uint64_t hash, uint32_t record) {
  Part& part = parts_[part_of(hash)];
  const auto tag = static_cast<uint32_t>(hash >> 32);
  uint32_t hole = part.slot_of(tag, record + 1);
  uint32_t line = hole & ~(kLineSlots - 1);
  bool full = look_at(part.slots + line, tag).empty == 0;
  part.slots[hole] = Slot{0, 0};
  --part.rows;
  while (full) {
    line = (line + kLineSlots) & part.mask;
    full = look_at(part.slots + line, tag).empty == 0;
    const uint32_t moved = part.movable(line, hole);
    if (moved == kNone) continue;
    part.slots[hole] = std::exchange(part.slots[moved], Slot{0, 0});
    hole = moved;
  }
}

std::vector<uint32_t> RowIndex::rows_of_parts(std::span<const uint64_t> hashes) const {
  std::vector<uint32_t> rows(parts_.size());
  for (const uint64_t hash : hashes) ++rows[part_of(hash)];
  return rows;
}

void RowIndex::reserve(std::span<const uint64_t> hashes) {
  const std::vector<uint32_t> more = rows_of_parts(hashes);
  for (size_t part = 0; part < parts_.size(); ++part) {
    while (more[part] != 0 && !has_room(part, more[part])) grow(parts_[part]);
  }
}

uint64_t RowIndex::growth_bytes(std::span<const uint64_t> hashes) const {
  const std::vector<uint32_t> more = rows_of_parts(hashes);
  Wanted wanted;
  for (size_t at = 0; at < parts_.size(); ++at) {
    if (more[at] == 0 || has_room(at, more[at])) continue;
    const Part& part = parts_[at];
    uint64_t slots = std::max<uint64_t>(kFirstSlots, 2 * part.size());
    while (too_many(at, part.rows + more[at], slots)) slots *= 2;
    add_to(wanted, slots);
  }
  return wanted.alone + memory_.new_chunks_bytes(wanted.in_chunks);
}

}  // namespace cpudist::table
