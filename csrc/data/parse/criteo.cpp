// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Criteo lines: one value per column, separated by tabs, nothing where a value is missing.
#include <cstring>

#include "data/parse/line.h"
#include "data/parse/parsers.h"

namespace cpudist::data {
namespace {

uint32_t columns_of(const SlotPlan& slot) { return slot.any_number() ? 1 : slot.dim; }

class CriteoParser : public Parser {
 public:
  explicit CriteoParser(const Schema& schema) : slots_(plan_slots(schema)), draft_(schema) {
    for (const SlotPlan& slot : slots_) {
      columns_ += columns_of(slot);
      if (!slot.used || slot.kind != SlotKind::kInt) continue;
      int_words_ += slot.any_number() ? 2 : slot.dim;
    }
  }

  bool parse(std::string_view line, RecordBuffer& records, LineError& error) override {
    line_ = line;
    end_ = line.data() + line.size();
    error_ = &error;
    draft_.begin(records, int_words_);
    if (!read_all()) {
      draft_.abandon();
      return false;
    }
    return draft_.commit(0) || fail_size(line, error);
  }

 private:
  // Readers take a column's first byte and return the next column's, which is one behind the line's
  // end when there is none, and null when they have filled in the error.
  bool read_all() {
    const char* at = line_.data();
    for (const SlotPlan& slot : slots_) {
      for (uint32_t left = columns_of(slot); left > 0; --left) {
        if (at > end_) return fail_columns(end_);
        at = read_column(slot, at);
        if (at == nullptr) return false;
      }
    }
    return at > end_ || fail_columns(at);
  }

  const char* read_column(const SlotPlan& slot, const char* at) {
    if (!slot.used) return skip_column(at);
    if (at == end_ || *at == '\t') return miss(slot, at);
    if (slot.kind == SlotKind::kFloat) return read_float_column(slot, at);
    if (slot.any_number()) draft_.add_int(1);
    return slot.hex ? read_hex_column(slot, at) : read_int_column(slot, at);
  }

  const char* skip_column(const char* at) const {
    const void* tab = std::memchr(at, '\t', static_cast<size_t>(end_ - at));
    return (tab == nullptr ? end_ : static_cast<const char*>(tab)) + 1;
  }

  const char* miss(const SlotPlan& slot, const char* at) {
    if (slot.kind == SlotKind::kFloat) {
      draft_.add_float(slot.missing_float);
    } else if (slot.any_number()) {
      draft_.add_int(0);
    } else {
      draft_.add_int(static_cast<uint64_t>(slot.missing_int));
    }
    return at + 1;
  }

  bool goes_on(const char* at) const { return at != end_ && *at != '\t'; }

  const char* read_hex_column(const SlotPlan& slot, const char* at) {
    const char* behind = at;
    uint64_t value = 0;
    const Fault fault = read_hex(behind, end_, value);
    if (fault != Fault::kNone || goes_on(behind)) return fail_column(slot, at, fault);
    draft_.add_int(slot.hashed() ? slot.id(value) : value);
    return behind + 1;
  }

  const char* read_int_column(const SlotPlan& slot, const char* at) {
    const char* behind = at;
    int64_t number = 0;
    const Fault fault = read_int(behind, end_, number);
    if (fault != Fault::kNone || goes_on(behind)) return fail_column(slot, at, fault);
    const auto value = static_cast<uint64_t>(number);
    draft_.add_int(slot.hashed() ? slot.id(value) : value);
    return behind + 1;
  }

  const char* read_float_column(const SlotPlan& slot, const char* at) {
    const char* behind = at;
    float value = 0;
    const Fault fault = read_float(behind, end_, value);
    if (fault != Fault::kNone || goes_on(behind)) return fail_column(slot, at, fault);
    draft_.add_float(value);
    return behind + 1;
  }

  [[gnu::cold]] const char* fail_column(const SlotPlan& slot, const char* at, Fault fault) {
    if (fault == Fault::kNone) fault = Fault::kNotANumber;
    const std::string_view text(at, static_cast<size_t>(skip_column(at) - 1 - at));
    fail_value(line_, slot, text, fault, *error_);
    return nullptr;
  }

  // `wrong` is where the columns that are too many begin, or the end of those too few.
  [[gnu::cold]] bool fail_columns(const char* wrong) {
    uint64_t found = 0;
    for (const char* at = line_.data(); at <= end_; ++found) at = skip_column(at);
    return fail(line_, wrong,
                "expected " + std::to_string(columns_) + " columns separated by tabs, found " +
                    std::to_string(found),
                *error_);
  }

  std::vector<SlotPlan> slots_;
  RecordDraft draft_;
  uint64_t columns_ = 0;
  size_t int_words_ = 0;
  // Of the line that is being read.
  std::string_view line_;
  const char* end_ = nullptr;
  LineError* error_ = nullptr;
};

}  // namespace

std::unique_ptr<Parser> make_criteo_parser(const Schema& schema) {
  return std::make_unique<CriteoParser>(schema);
}

}  // namespace cpudist::data
