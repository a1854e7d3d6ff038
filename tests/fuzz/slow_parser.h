// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// MultiSlot and Criteo lines read the plain way: cut into texts, each given to the C library.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/parse/hashing.h"
#include "data/parse/records.h"

namespace cpudist::fuzz {

using Texts = std::span<const std::string_view>;

inline std::vector<std::string_view> cut_at(std::string_view line, std::string_view delimiters,
                                            bool keep_empty) {
  std::vector<std::string_view> texts;
  texts.reserve(line.size() / 2 + 1);
  for (size_t begin = 0; begin <= line.size();) {
    const size_t end = std::min(line.find_first_of(delimiters, begin), line.size());
    if (keep_empty || end > begin) texts.push_back(line.substr(begin, end - begin));
    begin = end + 1;
  }
  return texts;
}

inline bool only(std::string_view text, const char* bytes) {
  return !text.empty() && text.find_first_not_of(bytes) == std::string_view::npos;
}

inline bool slow_int(std::string_view text, int64_t& value) {
  const bool sign = !text.empty() && (text[0] == '-' || text[0] == '+');
  if (!only(text.substr(sign), "0123456789")) return false;
  errno = 0;
  value = std::strtoll(std::string(text).c_str(), nullptr, 10);
  return errno == 0;
}

inline bool slow_hex(std::string_view text, uint64_t& value) {
  if (!only(text, "0123456789abcdefABCDEF") || text.size() > 16) return false;
  value = std::strtoull(std::string(text).c_str(), nullptr, 16);
  return true;
}

inline bool slow_float(std::string_view text, float& value) {
  if (!only(text, "0123456789+-.eE")) return false;
  const std::string copy(text);
  char* end = nullptr;
  value = std::strtof(copy.c_str(), &end);
  return end == copy.c_str() + copy.size() && std::isfinite(value);
}

inline uint64_t slow_text_id(std::string_view text, size_t slot, uint64_t range) {
  return static_cast<uint64_t>(
      data::hash_text(text.data(), text.size(), static_cast<uint32_t>(slot), range));
}

// Values of one used slot; an empty text is a missing one.
inline bool slow_values(const data::Schema& schema, size_t index, Texts texts,
                        std::vector<uint64_t>& ints, std::vector<float>& floats) {
  const data::Slot& slot = schema.slots[index];
  const bool by_text = slot.hash_range > 0 && schema.format == data::Format::kMultiSlot;
  for (const std::string_view text : texts) {
    if (slot.kind == data::SlotKind::kFloat) {
      float value = slot.missing_float;
      if (!text.empty() && !slow_float(text, value)) return false;
      floats.push_back(value);
      continue;
    }
    uint64_t value = static_cast<uint64_t>(slot.missing_int);
    int64_t number = 0;
    if (by_text) {
      value = slow_text_id(text, index, slot.hash_range);
    } else if (!text.empty()) {
      if (slot.hex ? !slow_hex(text, value) : !slow_int(text, number)) return false;
      if (!slot.hex) value = static_cast<uint64_t>(number);
      if (slot.hash_range > 0) {
        const auto position = static_cast<uint32_t>(index);
        value = static_cast<uint64_t>(data::hash_id(value, position, slot.hash_range));
      }
    }
    ints.push_back(value);
  }
  return true;
}

inline void slow_record(uint64_t instance_id, const std::vector<uint64_t>& ints,
                        std::vector<float> floats, std::vector<uint64_t>& record) {
  if (floats.size() % 2 != 0) floats.push_back(0.0f);
  const size_t words = data::kRecordHeaderWords + ints.size() + floats.size() / 2;
  record = {data::record_header(words, ints.size()), instance_id};
  record.insert(record.end(), ints.begin(), ints.end());
  record.resize(words);
  std::memcpy(record.data() + words - floats.size() / 2, floats.data(),
              floats.size() * sizeof(float));
}

// Takes the next slot's texts off the list. False: they are not there.
inline bool slow_texts(const data::Schema& schema, const data::Slot& slot, Texts& left,
                       Texts& texts) {
  size_t count = slot.dim == data::kAnyNumber ? 1 : slot.dim;
  size_t begin = 0;
  if (schema.format == data::Format::kMultiSlot) {
    int64_t number = 0;
    if (left.empty() || !slow_int(left[0], number) || number < 0) return false;
    if (slot.dim != data::kAnyNumber && number != slot.dim) return false;
    count = static_cast<size_t>(number);
    begin = 1;
  }
  if (count > left.size() - begin) return false;
  texts = left.subspan(begin, count);
  left = left.subspan(begin + count);
  return true;
}

inline bool parse_slowly(const data::Schema& schema, std::string_view line,
                         std::vector<uint64_t>& record) {
  const bool multislot = schema.format == data::Format::kMultiSlot;
  const std::vector<std::string_view> all = cut_at(line, multislot ? " \t" : "\t", !multislot);
  Texts left = all;
  uint64_t instance_id = 0;
  if (schema.instance_ids) {
    if (left.size() < 2 || left[0] != "1") return false;
    const std::string padded = std::string(left[1]) + std::string(8, '\0');
    instance_id = data::hash_bytes(padded.data(), left[1].size());
    left = left.subspan(2);
  }
  std::vector<uint64_t> ints;
  std::vector<float> floats;
  for (size_t i = 0; i < schema.slots.size(); ++i) {
    const data::Slot& slot = schema.slots[i];
    Texts texts;
    if (!slow_texts(schema, slot, left, texts)) return false;
    if (!slot.used) continue;
    const bool counted = slot.dim == data::kAnyNumber && slot.kind == data::SlotKind::kInt;
    if (counted && !multislot && texts[0].empty()) texts = {};
    if (counted) ints.push_back(texts.size());
    if (!slow_values(schema, i, texts, ints, floats)) return false;
  }
  if (!left.empty()) return false;
  slow_record(instance_id, ints, floats, record);
  return true;
}

}  // namespace cpudist::fuzz
