// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a line of a file holds, and how its record is laid out. Immutable once made; any thread may
// read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cpudist::data {

enum class Format : uint8_t {
  kMultiSlot,  // per slot `n v1 ... vn`, separated by spaces
  kCriteo,     // one value per column, separated by tabs, empty where missing; integers in hex
  kCsv,        // RFC 4180 without line breaks inside cells; a header names the columns
};

enum class SlotKind : uint8_t { kInt, kFloat };

inline constexpr uint64_t kSchemaValues = 1ull << 24;  // of all slots of fixed dim together
inline constexpr uint32_t kAnyNumber = 0;  // Slot::dim: values vary from record to record

struct Slot {
  std::string name;
  SlotKind kind = SlotKind::kInt;
  // Values per record; kAnyNumber for integers only.
  uint32_t dim = kAnyNumber;
  // 0: the value is the id. Else ids are hashed into [1, hash_range): by hash_text of the token's
  // bytes as they stand (kMultiSlot, kCsv), by hash_id of the number (kCriteo).
  uint64_t hash_range = 0;
  // kCriteo, integers: written in hex, at most 16 digits, which become the id's 64 bits. Else
  // integers are decimal.
  bool hex = false;
  // What stands where a value of a slot of fixed dim is missing (kCriteo, kCsv). Floats: as float.
  int64_t missing_int = 0;
  float missing_float = 0.0f;
  // False: read over and not kept. Its values are checked no further than to find their end.
  bool used = true;
  // kCsv: the columns that its values come from, one per value; of kAnyNumber one column, whose
  // cell holds ids separated by `separator`.
  std::vector<std::string> columns;
};

// Ids of hashed slots: 1 + (mix64(value ^ salt(slot)) * (hash_range - 1)) / 2^64, never 0, which is
// for missing values. `slot_index` is the position among all slots, so that equal values of two
// slots have nothing to do with each other.
int64_t hash_id(uint64_t value, uint32_t slot_index, uint64_t hash_range);
// The same of the bytes of a text, by hash_bytes of hashing.h.
int64_t hash_text(const char* text, size_t size, uint32_t slot_index, uint64_t hash_range);

struct Schema {
  Format format = Format::kMultiSlot;
  std::vector<Slot> slots;  // in the order of the line (kMultiSlot, kCriteo)
  char delimiter = ',';     // kCsv: between cells
  char separator = '|';     // kCsv: between the ids of a cell
  // kMultiSlot: a line begins with `1 <text>`, whose hash is kept as the record's instance id.
  bool instance_ids = false;

  // Throws Error(kInvalidArgument): no slots, none used, names twice, a float slot without
  // dim, hash_range 1 or on floats, hex where it means nothing, columns that do not fit, more than
  // kSchemaValues values of fixed dims.
  void check() const;
};

}  // namespace cpudist::data
