// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Lines parsed and records read back, for the tests of csrc/data.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/errors.h"
#include "data/parse/parser.h"
#include "data/parse/records.h"
#include "data/parse/schema.h"
#include "data/read/batch.h"
#include "support/check.h"

namespace cpudist::testing {

using data::Format;
using data::Schema;
using data::Slot;
using data::SlotKind;

// What a record says, per used slot of its kind.
struct Row {
  std::vector<std::vector<int64_t>> ints;
  std::vector<std::vector<float>> floats;
  uint64_t instance_id = 0;
  bool operator==(const Row&) const = default;
};

inline Row read_record(const Schema& schema, const uint64_t* record) {
  Row row;
  row.instance_id = record[1];
  const uint64_t* ints = record + data::kRecordHeaderWords;
  const uint64_t* floats = ints + data::record_int_words(record);
  const char* next = reinterpret_cast<const char*>(floats);
  for (const Slot& slot : schema.slots) {
    if (!slot.used) continue;
    if (slot.kind == SlotKind::kFloat) {
      auto& values = row.floats.emplace_back(slot.dim);
      std::memcpy(values.data(), next, slot.dim * sizeof(float));
      next += slot.dim * sizeof(float);
      continue;
    }
    const uint64_t count = slot.dim == data::kAnyNumber ? *ints++ : slot.dim;
    row.ints.emplace_back(ints, ints + count);
    ints += count;
  }
  CHECK(ints == floats);
  return row;
}

// Parses lines that are followed by bytes which would be read as more of the line.
class Lines {
 public:
  explicit Lines(Schema schema) : schema_(std::move(schema)), parser_(make_parser(schema_)) {}

  bool header(const std::string& line) { return parser_->header(guarded(line)); }
  bool parse(const std::string& line) { return parser_->parse(guarded(line), records_, error_); }

  Row row(const std::string& line) {
    const size_t before = records_.count();
    if (!parse(line)) fail(__FILE__, __LINE__, "'" + line + "': " + error_.message);
    CHECK_EQ(records_.count(), before + 1);
    const uint64_t* record = records_.record(before);
    CHECK_EQ(data::check_records(schema_, {record, data::record_words(record)}), 1u);
    return read_record(schema_, record);
  }

  // Expects the line to be refused at a column with a message that has `part` in it.
  void refused(const std::string& line, size_t column, const std::string& part) {
    const size_t count = records_.count();
    const size_t words = records_.size_words();
    CHECK(!parse(line));
    CHECK_EQ(records_.count(), count);
    CHECK_EQ(records_.size_words(), words);
    if (error_.column != column || error_.message.find(part) == std::string::npos) {
      fail(__FILE__, __LINE__,
           "'" + line + "': found column " + std::to_string(error_.column) + ", " + error_.message +
               "; expected column " + std::to_string(column) + ", " + part);
    }
  }

  const data::RecordBuffer& records() const { return records_; }
  const data::LineError& error() const { return error_; }
  const Schema& schema() const { return schema_; }

 private:
  // A copy of exactly the size that may be read.
  std::string_view guarded(const std::string& line) {
    text_ = std::make_unique<char[]>(line.size() + data::kLinePadding);
    std::memcpy(text_.get(), line.data(), line.size());
    std::memset(text_.get() + line.size(), '7', data::kLinePadding);
    return {text_.get(), line.size()};
  }

  Schema schema_;
  std::unique_ptr<data::Parser> parser_;
  data::RecordBuffer records_;
  data::LineError error_;
  std::unique_ptr<char[]> text_;
};

inline Slot ids(const std::string& name, uint32_t dim = data::kAnyNumber) {
  Slot slot;
  slot.name = name;
  slot.dim = dim;
  return slot;
}

inline Slot hashed(const std::string& name, uint64_t range, uint32_t dim = data::kAnyNumber) {
  Slot slot = ids(name, dim);
  slot.hash_range = range;
  return slot;
}

inline Slot floats(const std::string& name, uint32_t dim) {
  Slot slot = ids(name, dim);
  slot.kind = SlotKind::kFloat;
  return slot;
}

inline Slot unused(Slot slot) {
  slot.used = false;
  return slot;
}

inline Slot from_columns(Slot slot, std::vector<std::string> columns) {
  slot.columns = std::move(columns);
  return slot;
}

inline Schema schema_of(Format format, std::vector<Slot> slots) {
  Schema schema;
  schema.format = format;
  schema.slots = std::move(slots);
  return schema;
}

}  // namespace cpudist::testing
