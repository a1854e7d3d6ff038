// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/read/batch.h"

#include <algorithm>
#include <cstring>

namespace cpudist::data {
namespace {

// Records are read in blocks that stay in the fastest cache, slot by slot: each slot's section gets
// whole cache lines at a time. (Sections often begin a multiple of 4 KiB apart, where a value for
// each of them in turn would make them push each other out.)
constexpr size_t kBlockRecords = 32;
constexpr size_t kPrefetchWords = 64;  // of each record: the rest follows, as hardware sees
constexpr size_t kLineWords = 8;

struct Block {
  Block(std::span<const uint64_t* const> all, size_t begin)
      : records(all.subspan(begin, std::min(kBlockRecords, all.size() - begin))) {
    for (size_t i = 0; i < records.size(); ++i) ints[i] = records[i] + kRecordHeaderWords;
    const std::span<const uint64_t* const> next = all.subspan(begin + records.size());
    for (size_t i = 0; i < std::min(kBlockRecords, next.size()); ++i) {
      for (size_t word = 0; word < kPrefetchWords; word += kLineWords) {
        __builtin_prefetch(next[i] + word);
      }
    }
  }

  std::span<const uint64_t* const> records;
  const uint64_t* ints[kBlockRecords];  // of each record: the next one
};

void count_section(Block& block, IntSection& section) {
  for (size_t i = 0; i < block.records.size(); ++i) {
    size_t skipped = section.dim;
    if (section.dim == kAnyNumber) {
      section.values += *block.ints[i];
      skipped = 1 + *block.ints[i];
    }
    block.ints[i] += skipped;
  }
}

// How many values each integer slot has; returns the sum of all sections' sizes.
size_t count_ints(const Schema& schema, std::span<const uint64_t* const> records, Batch& batch) {
  auto& sections = batch.int_sections;
  sections.clear();
  bool counted = false;
  for (const Slot& slot : schema.slots) {
    if (!slot.used || slot.kind != SlotKind::kInt) continue;
    sections.push_back({slot.dim, slot.dim * records.size(), nullptr, nullptr});
    counted |= slot.dim == kAnyNumber;
  }
  for (size_t begin = 0; counted && begin < records.size(); begin += kBlockRecords) {
    Block block(records, begin);
    for (IntSection& section : sections) count_section(block, section);
  }
  size_t total = 0;
  for (const IntSection& section : sections) {
    total += section.values + (section.dim == kAnyNumber ? records.size() + 1 : 0);
  }
  return total;
}

void place_ints(Batch& batch) {
  int64_t* place = batch.ints.data();
  for (IntSection& section : batch.int_sections) {
    section.next = place;
    place += section.values;
    if (section.dim != kAnyNumber) continue;
    place[0] = 0;
    section.offsets = place + 1;
    place += batch.records + 1;
  }
}

inline void copy_values(int64_t*& to, const uint64_t*& from, size_t count) {
  if (count == 1) {
    *to = static_cast<int64_t>(*from);
  } else if (count > 0) {
    std::memcpy(to, from, count * sizeof(int64_t));
  }
  to += count;
  from += count;
}

void copy_section(Block& block, IntSection& section) {
  int64_t* next = section.next;
  if (section.dim != kAnyNumber) {
    for (size_t i = 0; i < block.records.size(); ++i) {
      copy_values(next, block.ints[i], section.dim);
    }
  } else {
    int64_t* offsets = section.offsets;
    int64_t offset = offsets[-1];
    for (size_t i = 0; i < block.records.size(); ++i) {
      const uint64_t count = *block.ints[i]++;
      offset += static_cast<int64_t>(count);
      *offsets++ = offset;
      copy_values(next, block.ints[i], count);
    }
    section.offsets = offsets;
  }
  section.next = next;
}

void place_floats(const Schema& schema, Batch& batch) {
  batch.float_sections.clear();
  float* place = batch.floats.data();
  for (const Slot& slot : schema.slots) {
    if (!slot.used || slot.kind != SlotKind::kFloat) continue;
    batch.float_sections.push_back({slot.dim, place});
    place += batch.records * slot.dim;
  }
}

// `skipped` floats of each record belong to the sections before this one.
void copy_section(const Block& block, size_t skipped, FloatSection& section) {
  float* next = section.next;
  for (const uint64_t* record : block.records) {
    const uint64_t* floats = record + kRecordHeaderWords + record_int_words(record);
    const char* from = reinterpret_cast<const char*>(floats) + skipped * sizeof(float);
    if (section.dim == 1) {
      std::memcpy(next, from, sizeof(float));
    } else {
      std::memcpy(next, from, section.dim * sizeof(float));
    }
    next += section.dim;
  }
  section.next = next;
}

void note_values(const Schema& schema, Batch& batch) {
  batch.values.clear();
  size_t next = 0;
  for (const Slot& slot : schema.slots) {
    if (!slot.used) continue;
    const bool is_int = slot.kind == SlotKind::kInt;
    batch.values.push_back(is_int ? batch.int_sections[next++].values : slot.dim * batch.records);
  }
}

}  // namespace

void assemble(const Schema& schema, std::span<const uint64_t* const> records, Batch& batch) {
  batch.records = records.size();
  batch.ints.resize_lost(count_ints(schema, records, batch));
  batch.floats.resize_lost(record_floats(schema) * records.size());
  note_values(schema, batch);
  place_ints(batch);
  place_floats(schema, batch);
  batch.instance_ids.resize(schema.instance_ids ? records.size() : 0);
  for (size_t begin = 0; begin < records.size(); begin += kBlockRecords) {
    Block block(records, begin);
    for (IntSection& section : batch.int_sections) copy_section(block, section);
    size_t skipped = 0;
    for (FloatSection& section : batch.float_sections) {
      copy_section(block, skipped, section);
      skipped += section.dim;
    }
    for (size_t i = 0; schema.instance_ids && i < block.records.size(); ++i) {
      batch.instance_ids[begin + i] = block.records[i][1];
    }
  }
}

}  // namespace cpudist::data
