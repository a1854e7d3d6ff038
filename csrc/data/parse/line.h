// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the parsers of all formats share: slots made ready for reading, the record being written,
// and how a bad line is described.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/parse/numbers.h"
#include "data/parse/parser.h"

namespace cpudist::data {

// A slot as the inner loops need it.
struct SlotPlan {
  SlotPlan(const Slot& slot, size_t index);

  bool any_number() const { return dim == kAnyNumber; }
  bool hashed() const { return ids > 0; }
  // Of a number, or of a text.
  uint64_t id(uint64_t value) const { return static_cast<uint64_t>(bucket_id(value, salt, ids)); }
  uint64_t id(std::string_view text) const { return id(hash_bytes(text.data(), text.size())); }

  SlotKind kind;
  bool used;
  bool hex;
  uint32_t dim;
  uint64_t ids;  // of hashed slots: how many different ones, else 0
  uint64_t salt;
  int64_t missing_int;
  float missing_float;
  std::string name;
};

std::vector<SlotPlan> plan_slots(const Schema& schema);

// A record while its line is read: integers go to the buffer, floats wait until all are there.
class RecordDraft {
 public:
  explicit RecordDraft(const Schema& schema);

  // `int_words` is room for the integers; need() can make more.
  void begin(RecordBuffer& records, size_t int_words) {
    records_ = &records;
    records.begin();
    records.need(kRecordHeaderWords + int_words + float_words_);
    next_int_ = records.cursor() + kRecordHeaderWords;
    next_float_ = floats_.data();
  }
  // Room for `int_words` more from here on.
  void need(size_t int_words) {
    records_->advance(static_cast<size_t>(next_int_ - records_->cursor()));
    records_->need(int_words + float_words_);
    next_int_ = records_->cursor();
  }
  void add_int(uint64_t value) { *next_int_++ = value; }
  void add_float(float value) { *next_float_++ = value; }
  // Where a count will stand, as a place that need() does not move.
  size_t add_count() { return static_cast<size_t>(next_int_++ - records_->open_record()); }
  void set_count(size_t place, size_t count) { records_->open_record()[place] = count; }
  // False: the record is larger than records can be, and was abandoned.
  bool commit(uint64_t instance_id);
  void abandon() { records_->abandon(); }

 private:
  RecordBuffer* records_ = nullptr;
  uint64_t* next_int_ = nullptr;
  float* next_float_ = nullptr;
  size_t float_words_;
  std::vector<float> floats_;  // an even number, the last one 0 if it is nobody's
};

// Bytes of a line for a message: printable ones as they are, at most 40 of them.
std::string excerpt(std::string_view text);
std::string slot_text(const SlotPlan& slot);

// Says what is wrong at `at`, a byte of the line or its end. Returns false, for parse().
bool fail(std::string_view line, const char* at, std::string message, LineError& error);
// A value that is not what its slot wants. `text` is the value up to its delimiter.
bool fail_value(std::string_view line, const SlotPlan& slot, std::string_view text, Fault fault,
                LineError& error);
bool fail_size(std::string_view line, LineError& error);

}  // namespace cpudist::data
