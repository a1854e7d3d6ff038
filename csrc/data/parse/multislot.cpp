// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// MultiSlot lines: per slot `n v1 ... vn`, separated by spaces or tabs. Zero is a value like any
// other, and an empty list of any number is a list.
#include "data/parse/line.h"
#include "data/parse/parsers.h"

namespace cpudist::data {
namespace {

// The first space, tab or end behind `at`.
const char* token_end(const char* at, const char* end) {
  while (end - at >= 8) {
    // Borrows only reach bytes behind the first that is one of the two.
    const uint64_t word = load8(at);
    const uint64_t spaces = word ^ (kEachByte * ' ');
    const uint64_t tabs = word ^ (kEachByte * '\t');
    const uint64_t found =
        (((spaces - kEachByte) & ~spaces) | ((tabs - kEachByte) & ~tabs)) & (kEachByte * 0x80);
    if (found != 0) return at + static_cast<size_t>(std::countr_zero(found)) / 8;
    at += 8;
  }
  while (at < end && !is_space(*at)) ++at;
  return at;
}

class MultiSlotParser : public Parser {
 public:
  explicit MultiSlotParser(const Schema& schema)
      : slots_(plan_slots(schema)), draft_(schema), instance_ids_(schema.instance_ids) {}

  bool parse(std::string_view line, RecordBuffer& records, LineError& error) override {
    line_ = line;
    end_ = line.data() + line.size();
    error_ = &error;
    // A count and a value take two bytes each, with their delimiters.
    draft_.begin(records, line.size() / 2 + 1);
    uint64_t instance_id = 0;
    if (!read_all(instance_id)) {
      draft_.abandon();
      return false;
    }
    return draft_.commit(instance_id) || fail_size(line, error);
  }

 private:
  // Readers take the place of a token, return that of the next one or the line's end, and null
  // when they have filled in the error.
  bool read_all(uint64_t& instance_id) {
    const char* at = skip_spaces(line_.data());
    if (instance_ids_) at = read_instance_id(at, instance_id);
    for (const SlotPlan& slot : slots_) {
      if (at == nullptr) return false;
      uint64_t count = 0;
      at = read_count(slot, at, count);
      if (at == nullptr) return false;
      at = read_values(slot, at, count);
    }
    if (at == nullptr || at == end_) return at != nullptr;
    return fail(line_, at,
                "expected the line's end after slot '" + slots_.back().name + "', found " +
                    excerpt(token(at)),
                *error_);
  }

  const char* read_values(const SlotPlan& slot, const char* at, uint64_t count) {
    if (!slot.used) return skip_values(slot, at, count);
    if (slot.kind == SlotKind::kFloat) return read_floats(slot, at, count);
    if (slot.any_number()) draft_.add_int(count);
    return slot.hashed() ? read_texts(slot, at, count) : read_ints(slot, at, count);
  }

  const char* read_instance_id(const char* at, uint64_t& instance_id) {
    const std::string_view one = token(at);
    const char* const begin = skip_spaces(one.data() + one.size());
    const std::string_view text = token(begin);
    if (one != "1" || text.empty()) {
      const std::string_view rest(at, static_cast<size_t>(end_ - at));
      fail(line_, at, "expected `1` and the instance id, found " + excerpt(rest), *error_);
      return nullptr;
    }
    instance_id = hash_bytes(text.data(), text.size());
    return skip_spaces(begin + text.size());
  }

  const char* read_count(const SlotPlan& slot, const char* at, uint64_t& count) {
    const char* const begin = at;
    if (end_ - at > 1 && is_digit(at[0]) && at[1] == ' ') {
      count = static_cast<uint64_t>(at[0] - '0');
      ++at;
    } else {
      int64_t number = 0;
      const Fault fault = read_int(at, end_, number);
      if (fault != Fault::kNone || number < 0 || (at != end_ && !is_space(*at))) {
        return fail_count(slot, begin, "expected the number of values");
      }
      count = static_cast<uint64_t>(number);
    }
    at = next_token(at);
    if (!slot.any_number() && count != slot.dim) {
      return fail_count(slot, begin, "expected " + std::to_string(slot.dim) + " values");
    }
    const auto left = static_cast<uint64_t>(end_ - at + 1) / 2;
    if (count <= left) return at;
    return fail_count(
        slot, begin,
        "expected no more values than the line has left, " + std::to_string(left) + " at most");
  }

  [[gnu::cold]] const char* fail_count(const SlotPlan& slot, const char* at,
                                       const std::string& what) {
    const std::string found = at == end_ ? "the line's end" : excerpt(token(at));
    fail(line_, at, slot_text(slot) + what + ", found " + found, *error_);
    return nullptr;
  }

  // `read` takes a number and leaves the place behind it; `keep` adds it to the draft.
  template <typename T, typename Read, typename Keep>
  const char* read_numbers(const SlotPlan& slot, const char* at, uint64_t count, const Read& read,
                           const Keep& keep) {
    for (; count > 0; --count) {
      const char* behind = at;
      T value{};
      const Fault fault = read(behind, end_, value);
      if (fault != Fault::kNone) return fail_token(slot, at, fault);
      behind = next_token(behind);
      if (behind == nullptr) return fail_token(slot, at, Fault::kNotANumber);
      at = behind;
      keep(value);
    }
    return at;
  }

  const char* read_ints(const SlotPlan& slot, const char* at, uint64_t count) {
    return read_numbers<int64_t>(
        slot, at, count,
        [](const char*& from, const char* end, int64_t& value) {
          return read_int(from, end, value);
        },
        [this](int64_t value) { draft_.add_int(static_cast<uint64_t>(value)); });
  }

  const char* read_floats(const SlotPlan& slot, const char* at, uint64_t count) {
    return read_numbers<float>(
        slot, at, count,
        [](const char*& from, const char* end, float& value) {
          return read_float(from, end, value);
        },
        [this](float value) { draft_.add_float(value); });
  }

  const char* read_texts(const SlotPlan& slot, const char* at, uint64_t count) {
    for (; count > 0; --count) {
      const std::string_view text = token(at);
      if (text.empty()) return fail_count(slot, at, "expected one more value");
      draft_.add_int(slot.id(text));
      at = next_token(at + text.size());
    }
    return at;
  }

  const char* skip_values(const SlotPlan& slot, const char* at, uint64_t count) {
    for (; count > 0; --count) {
      const size_t size = token(at).size();
      if (size == 0) return fail_count(slot, at, "expected one more value");
      at = next_token(at + size);
    }
    return at;
  }

  [[gnu::cold]] const char* fail_token(const SlotPlan& slot, const char* at, Fault fault) {
    if (at == end_) return fail_count(slot, at, "expected one more value");
    fail_value(line_, slot, token(at), fault, *error_);
    return nullptr;
  }

  std::string_view token(const char* at) const {
    return {at, static_cast<size_t>(token_end(at, end_) - at)};
  }
  // From the end of a token to the next one or the line's end. Null: the token goes on.
  const char* next_token(const char* at) const {
    if (end_ - at > 1 && *at == ' ' && static_cast<unsigned char>(at[1]) > ' ') return at + 1;
    if (at != end_ && !is_space(*at)) return nullptr;
    return skip_spaces(at);
  }
  const char* skip_spaces(const char* at) const {
    while (at != end_ && is_space(*at)) ++at;
    return at;
  }

  std::vector<SlotPlan> slots_;
  RecordDraft draft_;
  bool instance_ids_;
  // Of the line that is being read.
  std::string_view line_;
  const char* end_ = nullptr;
  LineError* error_ = nullptr;
};

}  // namespace

std::unique_ptr<Parser> make_multislot_parser(const Schema& schema) {
  return std::make_unique<MultiSlotParser>(schema);
}

}  // namespace cpudist::data
