// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Records as parsers write them, stores keep them and trainers send them to each other: one run of
// 8-byte words each. Batches are made from any list of them.
//
// A record: word 0 holds its size in words in the low 32 bits, this one included, and the
// number of its integer words in the high 32 bits. Word 1 is the instance id, 0 without one. Then
// the integer words: per used integer slot in the schema's order its values, those of a slot
// of any number behind a word with their count. Then the floats of all used float slots, two per
// word, the last word filled up with 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "data/parse/schema.h"

namespace cpudist::data {

inline constexpr size_t kRecordHeaderWords = 2;
inline constexpr size_t kRecordWordsLimit = 1ull << 31;  // of one record

inline uint32_t record_words(const uint64_t* record) { return static_cast<uint32_t>(*record); }
inline uint32_t record_int_words(const uint64_t* record) {
  return static_cast<uint32_t>(*record >> 32);
}

inline uint64_t record_header(size_t words, size_t int_words) {
  return static_cast<uint64_t>(int_words) << 32 | static_cast<uint64_t>(words);
}

// How many floats each record of a schema has.
size_t record_floats(const Schema& schema);

// Records one behind the other. Grows; what was written keeps its offset but not its address.
class RecordBuffer {
 public:
  RecordBuffer() = default;
  RecordBuffer(RecordBuffer&&) = default;
  RecordBuffer& operator=(RecordBuffer&&) = default;

  size_t count() const { return starts_.size(); }
  size_t size_words() const { return size_words_; }
  // Memory held, in bytes.
  size_t capacity_bytes() const;
  const uint64_t* record(size_t index) const { return words_.get() + starts_[index]; }
  void clear();  // keeps the memory

  // Writing a record: begin(), then any mix of need() and writes through cursor(), then commit();
  // or abandon(), after which the buffer is as before begin().
  void begin() { cursor_ = size_words_; }
  // Room for `words` more from the cursor on.
  void need(size_t words) {
    if (cursor_ + words > capacity_words_) grow(cursor_ + words);
  }
  uint64_t* cursor() { return words_.get() + cursor_; }
  uint64_t* open_record() { return words_.get() + size_words_; }
  void advance(size_t words) { cursor_ += words; }
  size_t open_words() const { return cursor_ - size_words_; }
  // The words before the cursor are the record, its header's words among them.
  void commit() {
    starts_.push_back(size_words_);
    size_words_ = cursor_;
  }
  void abandon() { cursor_ = size_words_; }

  // Appends a whole record that is known to be sound.
  void append(const uint64_t* record);

 private:
  void grow(size_t words);

  std::unique_ptr<uint64_t[]> words_;
  size_t capacity_words_ = 0;
  size_t size_words_ = 0;
  size_t cursor_ = 0;
  std::vector<uint64_t> starts_;
};

// Checks records that came from another process: sizes, counts and their sum against the schema
// and against the bytes there are. Returns the number of records; throws Error(kProtocol).
size_t check_records(const Schema& schema, std::span<const uint64_t> words);

}  // namespace cpudist::data
