// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/parse/columns.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/errors.h"

namespace cpudist::data {

namespace {

struct Column {
  const Slot* slot;
  ColumnValues values;
};

[[noreturn]] void refuse_columns(const Slot& slot, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "columns of slot '" + slot.name + "': " + what);
}

void check_offsets(const Slot& slot, const ColumnValues& column, size_t rows) {
  const auto& offsets = column.offsets;
  if (offsets.size() != rows + 1) {
    refuse_columns(slot, "expected " + std::to_string(rows + 1) + " offsets, found " +
                             std::to_string(offsets.size()));
  }
  const bool sorted = std::is_sorted(offsets.begin(), offsets.end());
  if (!sorted || offsets.front() < 0 ||
      static_cast<uint64_t>(offsets.back()) > column.ints.size()) {
    refuse_columns(slot,
                   "offsets must rise within [0, " + std::to_string(column.ints.size()) + "]");
  }
}

void check_column(const Slot& slot, const ColumnValues& column, size_t rows) {
  if (slot.dim == kAnyNumber) {
    check_offsets(slot, column, rows);
    return;
  }
  const bool ints = slot.kind == SlotKind::kInt;
  const size_t found = ints ? column.ints.size() : column.floats.size();
  const size_t others = ints ? column.floats.size() : column.ints.size();
  if (found / slot.dim != rows || found % slot.dim != 0 || others != 0 || !column.offsets.empty()) {
    refuse_columns(slot, "expected " + std::to_string(rows) + " x " + std::to_string(slot.dim) +
                             (ints ? " int64" : " float32") + " values without offsets, found " +
                             std::to_string(found));
  }
}

std::vector<Column> used_columns(const Schema& schema, size_t rows,
                                 std::span<const ColumnValues> values) {
  std::vector<Column> columns;
  for (const Slot& slot : schema.slots) {
    if (!slot.used) continue;
    if (columns.size() == values.size()) break;
    check_column(slot, values[columns.size()], rows);
    columns.push_back({&slot, values[columns.size()]});
  }
  const auto used = std::count_if(schema.slots.begin(), schema.slots.end(),
                                  [](const Slot& slot) { return slot.used; });
  if (values.size() != static_cast<size_t>(used)) {
    throw Error(ErrorCode::kInvalidArgument, "expected columns of " + std::to_string(used) +
                                                 " slots, found " + std::to_string(values.size()));
  }
  return columns;
}

void write_ints(std::span<const int64_t> values, RecordBuffer& records) {
  if (values.empty()) return;
  records.need(values.size());
  std::memcpy(records.cursor(), values.data(), values.size_bytes());
  records.advance(values.size());
}

// The floats of all slots are packed two to a word.
void write_floats(std::span<const Column> columns, size_t row, std::vector<float>& scratch,
                  RecordBuffer& records) {
  scratch.clear();
  for (const Column& column : columns) {
    if (column.slot->kind != SlotKind::kFloat) continue;
    const auto values = column.values.floats.subspan(row * column.slot->dim, column.slot->dim);
    scratch.insert(scratch.end(), values.begin(), values.end());
  }
  if (scratch.empty()) return;
  if (scratch.size() % 2 != 0) scratch.push_back(0.0f);
  records.need(scratch.size() / 2);
  std::memcpy(records.cursor(), scratch.data(), scratch.size() * sizeof(float));
  records.advance(scratch.size() / 2);
}

const Slot* slot_not_finite(std::span<const Column> columns, size_t row) {
  for (const Column& column : columns) {
    if (column.slot->kind != SlotKind::kFloat) continue;
    for (const float value :
         column.values.floats.subspan(row * column.slot->dim, column.slot->dim)) {
      if (!std::isfinite(value)) return column.slot;
    }
  }
  return nullptr;
}

void write_record(std::span<const Column> columns, size_t row, std::vector<float>& scratch,
                  RecordBuffer& records) {
  records.begin();
  records.need(kRecordHeaderWords);
  records.advance(kRecordHeaderWords);
  for (const Column& column : columns) {
    const ColumnValues& values = column.values;
    if (column.slot->kind != SlotKind::kInt) continue;
    if (column.slot->dim != kAnyNumber) {
      write_ints(values.ints.subspan(row * column.slot->dim, column.slot->dim), records);
      continue;
    }
    const auto begin = static_cast<size_t>(values.offsets[row]);
    const size_t count = static_cast<size_t>(values.offsets[row + 1]) - begin;
    records.need(1);
    *records.cursor() = count;
    records.advance(1);
    write_ints(values.ints.subspan(begin, count), records);
  }
  const size_t int_words = records.open_words() - kRecordHeaderWords;
  write_floats(columns, row, scratch, records);
  records.open_record()[0] = record_header(records.open_words(), int_words);
  records.open_record()[1] = 0;
  records.commit();
}

}  // namespace

ColumnRecords records_of_columns(const Schema& schema, size_t rows,
                                 std::span<const ColumnValues> values) {
  const std::vector<Column> columns = used_columns(schema, rows, values);
  ColumnRecords result;
  result.rows = rows;
  std::vector<float> scratch;
  for (size_t row = 0; row < rows; ++row) {
    if (const Slot* slot = slot_not_finite(columns, row)) {
      result.bad.push_back({row, "slot '" + slot->name + "': expected a finite number"});
    } else {
      write_record(columns, row, scratch, result.records);
    }
  }
  return result;
}

}  // namespace cpudist::data
