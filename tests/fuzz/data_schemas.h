// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The schemas that an input's first byte chooses from, and what is checked of records of any.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/parse/schema.h"
#include "data/read/batch.h"
#include "require.h"

namespace cpudist::fuzz {

inline data::Slot slot(const char* name, data::SlotKind kind, uint32_t dim) {
  data::Slot made;
  made.name = name;
  made.kind = kind;
  made.dim = dim;
  return made;
}

inline data::Schema schema_of(data::Format format, bool small) {
  using enum data::SlotKind;
  data::Schema schema;
  schema.format = format;
  schema.slots = {slot("a", kInt, 1), slot("b", kFloat, 2), slot("c", kInt, 0)};
  if (!small) {
    data::Slot hashed = slot("d", kInt, 0);
    hashed.hash_range = 1000;
    data::Slot skipped = slot("e", kInt, 0);
    skipped.used = false;
    data::Slot fixed = slot("f", kInt, 2);
    fixed.hash_range = 7;
    fixed.missing_int = 3;
    schema.slots.insert(schema.slots.end(), {hashed, skipped, fixed, slot("g", kFloat, 1)});
    schema.instance_ids = format == data::Format::kMultiSlot;
  }
  for (data::Slot& made : schema.slots) {
    const bool is_id = made.kind == kInt && made.name != "a";
    made.hex = format == data::Format::kCriteo && is_id;
    for (uint32_t i = 0; format == data::Format::kCsv && i < std::max(made.dim, 1u); ++i) {
      made.columns.push_back(made.name + std::to_string(i));
    }
  }
  return schema;
}

inline const std::vector<data::Schema>& schemas() {
  using enum data::Format;
  static const std::vector<data::Schema> all = {
      schema_of(kMultiSlot, true), schema_of(kMultiSlot, false), schema_of(kCriteo, true),
      schema_of(kCriteo, false),   schema_of(kCsv, true),        schema_of(kCsv, false)};
  return all;
}

// Assembles records in an order of their own and checks what comes out against itself.
inline void check_batch(const data::Schema& schema, std::vector<const uint64_t*> records) {
  static data::Batch batch;
  std::reverse(records.begin(), records.end());
  data::assemble(schema, records, batch);
  require(batch.records == records.size(), "a batch has all of its records");
  size_t ints = 0;
  size_t index = 0;
  for (const data::Slot& made : schema.slots) {
    if (!made.used) continue;
    const size_t values = batch.values[index++];
    if (made.kind == data::SlotKind::kFloat) continue;
    ints += values;
    if (made.dim != data::kAnyNumber) continue;
    const std::span<const int64_t> offsets(batch.ints.data() + ints, records.size() + 1);
    require(offsets.front() == 0, "offsets begin at 0");
    require(std::is_sorted(offsets.begin(), offsets.end()), "offsets do not fall");
    require(offsets.back() == static_cast<int64_t>(values), "offsets end at the number of values");
    ints += records.size() + 1;
  }
  require(ints == batch.ints.size(), "sections fill the batch");
}

}  // namespace cpudist::fuzz
