// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// CSV lines: the header says in which column each slot's values are.
#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "data/parse/csv_cells.h"
#include "data/parse/line.h"
#include "data/parse/parsers.h"

namespace cpudist::data {
namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

[[noreturn]] void refuse_header(const std::string& message) {
  throw Error(ErrorCode::kBadRecord, "header: " + message);
}

std::string names_of(const std::vector<Cell>& cells) {
  constexpr size_t kShown = 20;
  std::string names;
  for (size_t i = 0; i < std::min(cells.size(), kShown); ++i) {
    names += (i > 0 ? ", " : "") + excerpt(cells[i].text);
  }
  if (cells.size() > kShown) names += " and " + std::to_string(cells.size() - kShown) + " more";
  return names;
}

class CsvParser : public Parser {
 public:
  explicit CsvParser(const Schema& schema)
      : schema_(schema), slots_(plan_slots(schema)), draft_(schema), cells_(schema.delimiter) {
    for (const SlotPlan& slot : slots_) {
      if (slot.used && slot.kind == SlotKind::kInt) int_words_ += std::max(slot.dim, 1u);
    }
  }

  bool header(std::string_view line) override {
    columns_.clear();
    LineError error;
    if (!cells_.cut(line, error)) {
      refuse_header("column " + std::to_string(error.column) + ": " + error.message);
    }
    for (const Slot& slot : schema_.slots) {
      if (!slot.used) continue;
      for (const std::string& name : slot.columns) columns_.push_back(find_column(slot, name));
    }
    width_ = cells_.cells().size();
    return true;
  }

  bool parse(std::string_view line, RecordBuffer& records, LineError& error) override {
    if (width_ == 0) {
      throw Error(ErrorCode::kInternal, "a CSV parser needs the header() first");
    }
    line_ = line;
    error_ = &error;
    if (!cells_.cut(line, error)) return false;
    if (cells_.cells().size() != width_) return fail_columns();
    draft_.begin(records, int_words_);
    if (!read_all()) {
      draft_.abandon();
      return false;
    }
    return draft_.commit(0) || fail_size(line, error);
  }

 private:
  uint32_t find_column(const Slot& slot, const std::string& name) const {
    const std::vector<Cell>& cells = cells_.cells();
    const auto named = [&](const Cell& cell) { return cell.text == name; };
    const auto found = std::find_if(cells.begin(), cells.end(), named);
    const std::string wanted = "column " + excerpt(name) + " of slot '" + slot.name + "' ";
    if (found == cells.end()) refuse_header(wanted + "is missing; found " + names_of(cells));
    if (std::find_if(found + 1, cells.end(), named) != cells.end()) {
      refuse_header(wanted + "is there twice; names of columns that are read must differ");
    }
    return static_cast<uint32_t>(found - cells.begin());
  }

  bool read_all() {
    const uint32_t* column = columns_.data();
    for (const SlotPlan& slot : slots_) {
      if (!slot.used) continue;
      if (slot.any_number()) {
        if (!read_list(slot, cells_.cells()[*column++])) return false;
        continue;
      }
      for (uint32_t i = 0; i < slot.dim; ++i) {
        if (!read_cell(slot, cells_.cells()[*column++])) return false;
      }
    }
    return true;
  }

  bool read_cell(const SlotPlan& slot, const Cell& cell) {
    if (slot.hashed()) {
      draft_.add_int(cell.text.empty() ? static_cast<uint64_t>(slot.missing_int)
                                       : slot.id(cell.text));
      return true;
    }
    const std::string_view text = trimmed(cell.text);
    if (slot.kind == SlotKind::kFloat) return read_float_cell(slot, cell, text);
    if (text.empty()) {
      draft_.add_int(static_cast<uint64_t>(slot.missing_int));
      return true;
    }
    return read_id(slot, cell, text);
  }

  bool read_float_cell(const SlotPlan& slot, const Cell& cell, std::string_view text) {
    if (text.empty()) {
      draft_.add_float(slot.missing_float);
      return true;
    }
    const char* at = text.data();
    const char* const end = at + text.size();
    float value = 0;
    const Fault fault = read_float(at, end, value);
    if (fault != Fault::kNone || at != end) return fail_cell(slot, cell, text, fault);
    draft_.add_float(value);
    return true;
  }

  bool read_id(const SlotPlan& slot, const Cell& cell, std::string_view text) {
    const char* at = text.data();
    const char* const end = at + text.size();
    int64_t value = 0;
    const Fault fault = read_int(at, end, value);
    if (fault != Fault::kNone || at != end) return fail_cell(slot, cell, text, fault);
    draft_.add_int(static_cast<uint64_t>(value));
    return true;
  }

  bool read_list(const SlotPlan& slot, const Cell& cell) {
    const size_t count_place = draft_.add_count();
    std::string_view left = slot.hashed() ? cell.text : trimmed(cell.text);
    size_t count = 0;
    // An id takes two bytes with its separator; the rest of the record has had its room already.
    draft_.need(left.size() / 2 + 1 + int_words_);
    for (bool more = !left.empty(); more; ++count) {
      const size_t end = std::min(left.find(schema_.separator), left.size());
      const std::string_view piece = left.substr(0, end);
      const std::string_view text = slot.hashed() ? piece : trimmed(piece);
      if (text.empty()) return fail_cell(slot, cell, piece, Fault::kNotANumber);
      if (slot.hashed()) {
        draft_.add_int(slot.id(text));
      } else if (!read_id(slot, cell, text)) {
        return false;
      }
      more = end < left.size();
      left.remove_prefix(more ? end + 1 : end);
    }
    draft_.set_count(count_place, count);
    return true;
  }

  // A value that came from an escaped cell is no place in the line: the cell is.
  [[gnu::cold]] bool fail_cell(const SlotPlan& slot, const Cell& cell, std::string_view text,
                               Fault fault) {
    if (fault == Fault::kNone) fault = Fault::kNotANumber;
    fail_value(line_, slot, text, fault, *error_);
    const char* const at = cell.escaped ? cell.begin : text.data();
    error_->column = static_cast<size_t>(at - line_.data()) + 1;
    return false;
  }

  // Points to the first cell that is too many, or to the end of those that are too few.
  [[gnu::cold]] bool fail_columns() {
    const std::vector<Cell>& cells = cells_.cells();
    const char* const at =
        cells.size() > width_ ? cells[width_].begin : line_.data() + line_.size();
    return fail(line_, at,
                "expected " + std::to_string(width_) + " columns as in the header, found " +
                    std::to_string(cells.size()),
                *error_);
  }

  Schema schema_;
  std::vector<SlotPlan> slots_;
  RecordDraft draft_;
  CsvCells cells_;
  std::vector<uint32_t> columns_;  // of the values of used slots, in their order
  size_t width_ = 0;               // columns of the header; 0 before it came
  size_t int_words_ = 0;
  // Of the line that is being read.
  std::string_view line_;
  LineError* error_ = nullptr;
};

}  // namespace

std::unique_ptr<Parser> make_csv_parser(const Schema& schema) {
  return std::make_unique<CsvParser>(schema);
}

}  // namespace cpudist::data
