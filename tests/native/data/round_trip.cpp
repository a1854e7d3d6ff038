// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Random schemas and rows of every format, written as text in random ways and read back.

#include <algorithm>
#include <charconv>
#include <random>

#include "data/parse/hashing.h"
#include "support/data_fixture.h"

using namespace cpudist::testing;  // NOLINT

namespace {

using Generator = std::mt19937_64;

int64_t random_int(Generator& generator) {
  return static_cast<int64_t>(generator()) >> (generator() % 64);
}

float random_float(Generator& generator) {
  for (;;) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(generator()));
    if (generator() % 2 == 0) return static_cast<float>(generator() % 2000) / 64 - 10;
    if (value - value == 0) return value;
  }
}

std::string float_text(float value) {
  char text[64];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

Schema random_schema(Format format, Generator& generator) {
  Schema schema = schema_of(format, {});
  schema.instance_ids = format == Format::kMultiSlot && generator() % 2 == 0;
  const size_t count = 1 + generator() % 8;
  size_t columns = 0;
  for (size_t i = 0; i < count; ++i) {
    const bool is_float = generator() % 3 == 0;
    const auto dim = static_cast<uint32_t>(is_float ? 1 + generator() % 5 : generator() % 3);
    Slot slot = is_float ? floats("s" + std::to_string(i), dim) : ids("s" + std::to_string(i), dim);
    if (!is_float && generator() % 4 == 0) slot.hash_range = 2 + generator() % 1000;
    slot.hex = format == Format::kCriteo && !is_float && generator() % 2 == 0;
    slot.used = i == 0 || generator() % 4 != 0;
    slot.missing_int = random_int(generator);
    slot.missing_float = random_float(generator);
    for (uint32_t j = 0; format == Format::kCsv && j < std::max(dim, 1u); ++j) {
      slot.columns.push_back("c" + std::to_string(columns++));
    }
    schema.slots.push_back(slot);
  }
  return schema;
}

// One value: its text, and what it becomes.
struct Value {
  std::string text;
  int64_t as_int = 0;
  float as_float = 0;
};

Value random_value(const Schema& schema, size_t index, Generator& generator) {
  const Slot& slot = schema.slots[index];
  Value value;
  if (slot.kind == SlotKind::kFloat) {
    value.as_float = random_float(generator);
    value.text = float_text(value.as_float);
    return value;
  }
  const auto position = static_cast<uint32_t>(index);
  value.as_int = random_int(generator);
  value.text = std::to_string(value.as_int);
  if (slot.hex) {
    char text[20];
    std::snprintf(text, sizeof(text), "%llx", static_cast<unsigned long long>(value.as_int));
    value.text = text;
  }
  if (slot.hash_range == 0) return value;
  value.as_int =
      schema.format == Format::kCriteo
          ? cpudist::data::hash_id(static_cast<uint64_t>(value.as_int), position, slot.hash_range)
          : cpudist::data::hash_text(value.text.data(), value.text.size(), position,
                                     slot.hash_range);
  return value;
}

void keep(const Slot& slot, const std::vector<Value>& values, Row& row) {
  if (!slot.used) return;
  if (slot.kind == SlotKind::kFloat) {
    auto& kept = row.floats.emplace_back();
    for (const Value& value : values) kept.push_back(value.as_float);
  } else {
    auto& kept = row.ints.emplace_back();
    for (const Value& value : values) kept.push_back(value.as_int);
  }
}

std::string multislot_line(const Schema& schema, Generator& generator, Row& row) {
  const auto gap = [&] {
    return generator() % 8 > 0 ? " "
                               : std::string(1 + generator() % 3, generator() % 2 ? ' ' : '\t');
  };
  std::string line;
  if (schema.instance_ids) {
    const std::string name = "user" + std::to_string(generator());
    row.instance_id = cpudist::data::hash_bytes((name + std::string(8, '\0')).data(), name.size());
    line = "1" + gap() + name + gap();
  }
  for (size_t i = 0; i < schema.slots.size(); ++i) {
    const Slot& slot = schema.slots[i];
    std::vector<Value> values(slot.dim > 0 ? slot.dim : generator() % 5);
    line += std::to_string(values.size());
    for (Value& value : values) {
      value = random_value(schema, i, generator);
      line += gap() + value.text;
    }
    line += i + 1 < schema.slots.size() || generator() % 4 == 0 ? gap() : "";
    keep(slot, values, row);
  }
  return line;
}

// Of kCriteo and kCsv: one cell per value, some missing.
std::string cell_line(const Schema& schema, Generator& generator, Row& row) {
  const bool csv = schema.format == Format::kCsv;
  std::string line;
  for (size_t i = 0; i < schema.slots.size(); ++i) {
    const Slot& slot = schema.slots[i];
    std::vector<Value> values;
    for (uint32_t j = 0; j < std::max(slot.dim, 1u); ++j) {
      if (i + j > 0) line += csv ? ',' : '\t';
      Value value{"", slot.missing_int, slot.missing_float};
      const bool missing = generator() % 5 == 0;
      if (!missing) value = random_value(schema, i, generator);
      if (!missing || slot.dim > 0) values.push_back(value);
      std::string cell = value.text;
      for (size_t more = csv && !missing && slot.dim == 0 ? generator() % 4 : 0; more > 0; --more) {
        values.push_back(random_value(schema, i, generator));
        cell += "|" + values.back().text;
      }
      if (csv && slot.hash_range == 0 && generator() % 4 == 0) cell = " " + cell + " ";
      line += csv && generator() % 4 == 0 ? "\"" + cell + "\"" : cell;
    }
    keep(slot, values, row);
  }
  return line;
}

std::string header_line(const Schema& schema) {
  std::string line;
  for (const Slot& slot : schema.slots) {
    for (const std::string& name : slot.columns) line += (line.empty() ? "" : ",") + name;
  }
  return line;
}

}  // namespace

TEST(data_random_rows_come_back) {
  Generator generator(11);
  for (const Format format : {Format::kMultiSlot, Format::kCriteo, Format::kCsv}) {
    for (int round = 0; round < 200; ++round) {
      Lines lines(random_schema(format, generator));
      if (format == Format::kCsv) lines.header(header_line(lines.schema()));
      for (int i = 0; i < 20; ++i) {
        Row row;
        const std::string line = format == Format::kMultiSlot
                                     ? multislot_line(lines.schema(), generator, row)
                                     : cell_line(lines.schema(), generator, row);
        if (!(lines.row(line) == row)) fail(__FILE__, __LINE__, "'" + line + "' became another");
      }
    }
  }
}
