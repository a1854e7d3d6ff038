// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/parse/records.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/errors.h"

namespace cpudist::data {
namespace {

[[noreturn]] void refuse(size_t record, const std::string& what) {
  throw Error(ErrorCode::kProtocol, "record " + std::to_string(record) + " of those received: " +
                                        what + "; all trainers must read the same slots");
}

// Throws unless the slots' counts fill the integer words exactly.
void check_counts(const Schema& schema, std::span<const uint64_t> ints, size_t record) {
  size_t at = 0;
  for (const Slot& slot : schema.slots) {
    if (!slot.used || slot.kind != SlotKind::kInt) continue;
    const bool counted = slot.dim == kAnyNumber;
    if (counted && at == ints.size()) refuse(record, "no count for slot '" + slot.name + "'");
    const uint64_t count = counted ? ints[at++] : slot.dim;
    if (count > ints.size() - at) {
      refuse(record, "slot '" + slot.name + "' has " + std::to_string(count) +
                         " values, the record has " + std::to_string(ints.size() - at));
    }
    at += count;
  }
  if (at != ints.size()) {
    refuse(record, std::to_string(ints.size() - at) + " integers behind the last slot");
  }
}

}  // namespace

size_t record_floats(const Schema& schema) {
  size_t floats = 0;
  for (const Slot& slot : schema.slots) {
    if (slot.used && slot.kind == SlotKind::kFloat) floats += slot.dim;
  }
  return floats;
}

size_t RecordBuffer::capacity_bytes() const {
  return (capacity_words_ + starts_.capacity()) * sizeof(uint64_t);
}

void RecordBuffer::clear() {
  starts_.clear();
  size_words_ = 0;
  cursor_ = 0;
}

void RecordBuffer::append(const uint64_t* record) {
  const size_t words = record_words(record);
  begin();
  need(words);
  std::memcpy(cursor(), record, words * sizeof(uint64_t));
  advance(words);
  commit();
}

void RecordBuffer::grow(size_t words) {
  const size_t capacity = std::max(words, capacity_words_ + capacity_words_ / 2);
  auto larger = std::make_unique_for_overwrite<uint64_t[]>(capacity);
  if (cursor_ > 0 || size_words_ > 0) {
    const size_t kept = std::max(cursor_, size_words_);
    std::memcpy(larger.get(), words_.get(), kept * sizeof(uint64_t));
  }
  words_ = std::move(larger);
  capacity_words_ = capacity;
}

size_t check_records(const Schema& schema, std::span<const uint64_t> words) {
  const size_t floats = record_floats(schema);
  const size_t float_words = (floats + 1) / 2;
  size_t records = 0;
  for (size_t at = 0; at < words.size(); ++records) {
    const uint64_t* record = words.data() + at;
    const size_t size = record_words(record);
    const size_t ints = record_int_words(record);
    if (size > words.size() - at) {
      refuse(records,
             std::to_string(size) + " words, " + std::to_string(words.size() - at) + " are left");
    }
    if (size != kRecordHeaderWords + ints + float_words) {
      refuse(records, std::to_string(size) + " words with " + std::to_string(ints) +
                          " of integers, expected " +
                          std::to_string(kRecordHeaderWords + ints + float_words));
    }
    if (!schema.instance_ids && record[1] != 0) refuse(records, "an instance id nobody asked for");
    if (floats % 2 != 0 && record[size - 1] >> 32 != 0) refuse(records, "bits behind the floats");
    check_counts(schema, {record + kRecordHeaderWords, ints}, records);
    at += size;
  }
  return records;
}

}  // namespace cpudist::data
