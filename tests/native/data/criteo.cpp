// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Criteo lines: missing values, hex, hashing, and what is said of lines that are wrong.

#include "support/data_fixture.h"

using namespace cpudist::testing;  // NOLINT

namespace {

Slot hex(Slot slot) {
  slot.hex = true;
  return slot;
}

Schema five_columns() {
  Slot dense = floats("dense", 2);
  dense.missing_float = -1.0f;
  Slot one = hex(ids("one", 1));
  one.missing_int = 5;
  return schema_of(Format::kCriteo, {ids("label", 1), dense, one, hex(ids("list"))});
}

}  // namespace

TEST(data_criteo_values_and_missing_ones) {
  Lines lines(five_columns());
  CHECK(lines.row("1\t-2\t3.5\t68fd1e64\tA") == (Row{{{1}, {0x68fd1e64}, {10}}, {{-2, 3.5f}}, 0}));
  CHECK(lines.row("0\t\t\t\t") == (Row{{{0}, {5}, {}}, {{-1, -1}}, 0}));
  CHECK(lines.row("\t\t\t\t0") == (Row{{{0}, {5}, {0}}, {{-1, -1}}, 0}));
  CHECK(lines.row("7\t1\t\tffffffffffffffff\t00") == (Row{{{7}, {-1}, {0}}, {{1, -1}}, 0}));
}

TEST(data_criteo_ids_are_hashed_by_value) {
  Slot one = hex(hashed("one", 1 << 20, 1));
  Lines lines(
      schema_of(Format::kCriteo, {one, hex(hashed("list", 1 << 20)), hashed("int", 50, 1)}));
  const auto id = [](uint64_t value, uint32_t slot, uint64_t range) {
    return cpudist::data::hash_id(value, slot, range);
  };
  const Row row = lines.row("0ff\tff\t-3");
  const int64_t last = id(static_cast<uint64_t>(-3), 2, 50);
  CHECK(row == (Row{{{id(255, 0, 1 << 20)}, {id(255, 1, 1 << 20)}, {last}}, {}, 0}));
  CHECK(lines.row("\t\t") == (Row{{{0}, {}, {0}}, {}, 0}));
}

TEST(data_hashes_stay_in_range_and_spread) {
  std::vector<int> seen(10);
  for (uint64_t value = 0; value < 9000; ++value) {
    ++seen[static_cast<size_t>(cpudist::data::hash_id(value, 3, 10))];
  }
  CHECK_EQ(seen[0], 0);
  for (size_t id = 1; id < 10; ++id) CHECK(seen[id] > 850 && seen[id] < 1150);
  CHECK_EQ(cpudist::data::hash_id(1234, 0, 2), 1);
  // What models were trained on must not change.
  CHECK_EQ(cpudist::data::hash_id(0x68fd1e64, 14, 1'000'000), 292987);
  CHECK_EQ(cpudist::data::hash_text("JFK", 3, 2, 1'000'000), 576658);
  CHECK_EQ(cpudist::data::hash_text("more than 8", 11, 2, 1ull << 62), 202256657768489668);
}

TEST(data_criteo_bad_columns_name_slot_and_column) {
  Lines lines(five_columns());
  lines.refused("x\t\t\t\t", 1, "slot 'label': expected an integer, found 'x'");
  lines.refused("1 \t\t\t\t", 1, "slot 'label': expected an integer, found '1 '");
  lines.refused("1\t\tnan\t\t", 4, "slot 'dense': expected a finite number, found 'nan'");
  lines.refused("1\t\t1e39\t\t", 4, "slot 'dense': expected a number that fits float32");
  lines.refused("1\t\t\tg1\t", 5, "slot 'one': expected 1 to 16 hex digits, found 'g1'");
  lines.refused("1\t\t\t1g\t", 5, "slot 'one': expected 1 to 16 hex digits, found '1g'");
  lines.refused("1\t\t\t\t0123456789abcdef0", 6, "slot 'list': expected 1 to 16 hex digits");
  lines.refused("1\t\t\t\t0123456789abcdef-", 6, "slot 'list': expected 1 to 16 hex digits");
  lines.refused(std::string("1\t\t\t\t1\0", 7), 6, "found '1\\x00'");
  lines.refused("", 1, "expected 5 columns separated by tabs, found 1");
  lines.refused("1\t2\t3\t4", 8, "expected 5 columns separated by tabs, found 4");
  lines.refused("1\t2\t3\t4\t5\t", 11, "expected 5 columns separated by tabs, found 6");
  lines.refused("1\t2\t3\t4\t5\t6\t7", 11, "expected 5 columns separated by tabs, found 7");
  CHECK_EQ(lines.records().count(), 0u);
}

TEST(data_criteo_unused_columns_are_read_over) {
  Lines lines(schema_of(Format::kCriteo, {unused(floats("a", 2)), ids("b", 2), unused(ids("c"))}));
  CHECK(lines.row("x\ty\t3\t4\tz") == (Row{{{3, 4}}, {}, 0}));
  lines.refused("x\ty\t3\t4", 8, "expected 5 columns separated by tabs, found 4");
}
