// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/parse/schema.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "base/errors.h"
#include "data/parse/hashing.h"

namespace cpudist::data {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

[[noreturn]] void refuse(const Slot& slot, const std::string& message) {
  refuse("slot '" + slot.name + "': " + message);
}

void check_hashing(const Slot& slot, Format format) {
  if (slot.kind == SlotKind::kFloat) {
    if (slot.hash_range != 0) refuse(slot, "floats cannot be hashed; take hash_range away");
    if (slot.hex) refuse(slot, "floats are not written in hex; take hex away");
  }
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  if (slot.hash_range == 1 || slot.hash_range > kMost) {
    refuse(slot, "hash_range is " + std::to_string(slot.hash_range) +
                     "; expected 0 (ids are not hashed) or 2 to " + std::to_string(kMost) +
                     ": hashed ids are 1 to hash_range - 1, as 0 is for missing values");
  }
  if (slot.hex && format != Format::kCriteo) refuse(slot, "hex is for the format criteo only");
}

void check_columns(const Slot& slot, Format format) {
  if (format != Format::kCsv) {
    if (!slot.columns.empty()) refuse(slot, "columns are named in the format csv only");
    return;
  }
  const size_t expected = slot.dim == kAnyNumber ? 1 : slot.dim;
  if (slot.columns.size() != expected) {
    refuse(slot, "expected the names of " + std::to_string(expected) + " columns, found " +
                     std::to_string(slot.columns.size()));
  }
}

void check_delimiters(char delimiter, char separator) {
  const auto bad = [](char byte) {
    return byte == '"' || byte == '\n' || byte == '\r' || byte == '\0';
  };
  if (bad(delimiter)) refuse("the delimiter of cells cannot be a quote, a line end or NUL");
  if (bad(separator)) refuse("the separator of ids cannot be a quote, a line end or NUL");
  if (delimiter == separator) {
    refuse(std::string("the delimiter of cells and the separator of ids are both '") + delimiter +
           "'; they must differ");
  }
}

}  // namespace

int64_t hash_id(uint64_t value, uint32_t slot_index, uint64_t hash_range) {
  return bucket_id(value, slot_salt(slot_index), hash_range - 1);
}

int64_t hash_text(const char* text, size_t size, uint32_t slot_index, uint64_t hash_range) {
  // hash_bytes may read a word that begins in the text: the end is hashed from a copy.
  std::string padded(text, size);
  padded.append(8, '\0');
  return hash_id(hash_bytes(padded.data(), size), slot_index, hash_range);
}

void Schema::check() const {
  if (slots.empty()) refuse("no slots; name at least one");
  if (format == Format::kCsv) check_delimiters(delimiter, separator);
  if (instance_ids && format != Format::kMultiSlot) {
    refuse("instance ids are read from the format multislot only");
  }
  std::unordered_set<std::string> names;
  uint64_t values = 0;
  for (const Slot& slot : slots) {
    if (!names.insert(slot.name).second) refuse(slot, "the name is there twice");
    if (slot.kind == SlotKind::kFloat && slot.dim == kAnyNumber) {
      refuse(slot, "floats need a dim; any number of values is for integers");
    }
    check_hashing(slot, format);
    check_columns(slot, format);
    values += slot.dim;
  }
  if (values > kSchemaValues) {
    refuse("the dims of all slots are " + std::to_string(values) + " values together; at most " +
           std::to_string(kSchemaValues) + " fit a record");
  }
  if (std::none_of(slots.begin(), slots.end(), [](const Slot& slot) { return slot.used; })) {
    refuse("no slot is used; set used of at least one");
  }
}

}  // namespace cpudist::data
