// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/parse/line.h"

#include <cstring>
#include <utility>

namespace cpudist::data {
namespace {

constexpr size_t kExcerptBytes = 40;

const char* expectation(const SlotPlan& slot, Fault fault) {
  if (slot.kind == SlotKind::kFloat) {
    if (fault == Fault::kNotFinite) return "expected a finite number";
    return fault == Fault::kTooLarge ? "expected a number that fits float32" : "expected a number";
  }
  if (slot.hex) return "expected 1 to 16 hex digits";
  return fault == Fault::kTooLarge ? "expected an integer that fits 64 bits with a sign"
                                   : "expected an integer";
}

}  // namespace

SlotPlan::SlotPlan(const Slot& slot, size_t index)
    : kind(slot.kind),
      used(slot.used),
      hex(slot.hex),
      dim(slot.dim),
      ids(slot.hash_range > 0 ? slot.hash_range - 1 : 0),
      salt(slot_salt(static_cast<uint32_t>(index))),
      missing_int(slot.missing_int),
      missing_float(slot.missing_float),
      name(slot.name) {}

std::vector<SlotPlan> plan_slots(const Schema& schema) {
  std::vector<SlotPlan> plans;
  plans.reserve(schema.slots.size());
  for (const Slot& slot : schema.slots) plans.emplace_back(slot, plans.size());
  return plans;
}

RecordDraft::RecordDraft(const Schema& schema)
    : float_words_((record_floats(schema) + 1) / 2), floats_(2 * float_words_, 0.0f) {}

bool RecordDraft::commit(uint64_t instance_id) {
  uint64_t* record = records_->open_record();
  const auto int_words = static_cast<size_t>(next_int_ - record) - kRecordHeaderWords;
  const size_t words = kRecordHeaderWords + int_words + float_words_;
  if (words > kRecordWordsLimit) {
    abandon();
    return false;
  }
  record[0] = record_header(words, int_words);
  record[1] = instance_id;
  if (float_words_ > 0) std::memcpy(next_int_, floats_.data(), float_words_ * sizeof(uint64_t));
  records_->advance(words - records_->open_words());
  records_->commit();
  return true;
}

std::string excerpt(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  const std::string_view cut = text.substr(0, kExcerptBytes);
  std::string shown = "'";
  for (const char byte : cut) {
    const auto code = static_cast<unsigned char>(byte);
    if (code >= 0x20 && code < 0x7f) {
      shown += byte;
    } else {
      shown += {'\\', 'x', kHex[code >> 4], kHex[code & 15]};
    }
  }
  shown += "'";
  if (cut.size() < text.size()) {
    shown += " and " + std::to_string(text.size() - cut.size()) + " bytes more";
  }
  return shown;
}

std::string slot_text(const SlotPlan& slot) { return "slot '" + slot.name + "': "; }

bool fail(std::string_view line, const char* at, std::string message, LineError& error) {
  error.column = static_cast<size_t>(at - line.data()) + 1;
  error.message = std::move(message);
  return false;
}

bool fail_value(std::string_view line, const SlotPlan& slot, std::string_view text, Fault fault,
                LineError& error) {
  const std::string found = text.empty() ? "nothing" : excerpt(text);
  return fail(line, text.data(), slot_text(slot) + expectation(slot, fault) + ", found " + found,
              error);
}

bool fail_size(std::string_view line, LineError& error) {
  return fail(
      line, line.data(),
      "the line's record has more than " + std::to_string(kRecordWordsLimit) + " values; split it",
      error);
}

}  // namespace cpudist::data
