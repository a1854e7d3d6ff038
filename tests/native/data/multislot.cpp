// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// MultiSlot lines: what they become, and what is said of those that are wrong.

#include "data/parse/hashing.h"
#include "support/data_fixture.h"

using namespace cpudist::testing;  // NOLINT

namespace {

Schema three_slots() {
  return schema_of(Format::kMultiSlot, {ids("click", 1), floats("dense", 3), ids("words")});
}

}  // namespace

TEST(data_multislot_values_are_kept_as_they_are) {
  Lines lines(three_slots());
  const Row expected{{{1}, {0, 7, -9223372036854775807 - 1}}, {{0.0f, -1.5f, 2e-3f}}, 0};
  CHECK(lines.row("1 1 3 0 -1.5 2e-3 3 0 7 -9223372036854775808") == expected);
  CHECK(lines.row("1 1 3 0 -1.5 2e-3 3 0 7 -9223372036854775808  ") == expected);
  CHECK(lines.row("  1\t1  3 0   -1.5\t 2e-3 3 0 7 -9223372036854775808\t") == expected);
}

TEST(data_multislot_lists_may_be_empty) {
  Lines lines(schema_of(Format::kMultiSlot, {ids("a"), ids("b"), ids("c")}));
  CHECK(lines.row("0 2 5 6 0") == (Row{{{}, {5, 6}, {}}, {}, 0}));
  CHECK(lines.row("0 0 0") == (Row{{{}, {}, {}}, {}, 0}));
  CHECK(lines.row("00 000 +0 ") == (Row{{{}, {}, {}}, {}, 0}));
}

TEST(data_multislot_unused_slots_are_read_over) {
  Lines lines(schema_of(Format::kMultiSlot,
                        {unused(ids("a")), ids("b", 1), unused(floats("c", 2)), unused(ids("d"))}));
  CHECK(lines.row("3 x y nan 1 4 2 ? ! 0") == (Row{{{4}}, {}, 0}));
  lines.refused("3 x y nan 1 4 2 ?", 15,
                "slot 'c': expected no more values than the line has left");
  lines.refused("3 x y nan 1 4 3 ? ! . 0", 15, "slot 'c': expected 2 values, found '3'");
}

TEST(data_multislot_texts_are_hashed_by_their_bytes) {
  Lines lines(schema_of(Format::kMultiSlot, {hashed("a", 1000), hashed("b", 1000), ids("c")}));
  const std::string text = std::string("a\0b", 3) + "\xff" + "-and-more-than-eight-bytes";
  const Row row = lines.row("2 " + text + " 12 1 12 1 12");
  const auto id = [](const std::string& token, uint32_t slot) {
    return cpudist::data::hash_text(token.data(), token.size(), slot, 1000);
  };
  CHECK(row == (Row{{{id(text, 0), id("12", 0)}, {id("12", 1)}, {12}}, {}, 0}));
  CHECK(id("12", 0) != id("12", 1));
  CHECK(id("12", 0) != id("012", 0));
}

TEST(data_multislot_instance_ids) {
  Schema schema = three_slots();
  schema.instance_ids = true;
  Lines lines(schema);
  const Row row = lines.row("1 user-17 1 1 3 0 0 0 0");
  CHECK_EQ(row.instance_id, cpudist::data::hash_bytes("user-17\0\0\0\0\0\0\0", 7));
  CHECK(lines.row("1 user-18 1 1 3 0 0 0 0").instance_id != row.instance_id);
  lines.refused("2 user-17 1 1 3 0 0 0 0", 1, "expected `1` and the instance id");
  lines.refused("1", 1, "expected `1` and the instance id");
  lines.refused("", 1, "expected `1` and the instance id");
  lines.refused("1 user-17", 10,
                "slot 'click': expected the number of values, found the line's end");
}

TEST(data_multislot_bad_counts_name_slot_and_column) {
  Lines lines(three_slots());
  lines.refused("", 1, "slot 'click': expected the number of values, found the line's end");
  lines.refused("x", 1, "slot 'click': expected the number of values, found 'x'");
  lines.refused("0 3 0 0 0 0", 1, "slot 'click': expected 1 values, found '0'");
  lines.refused("1 1 2 0 0 1 5", 5, "slot 'dense': expected 3 values, found '2'");
  lines.refused("1 1 3 0 0 0 -1", 13, "slot 'words': expected the number of values, found '-1'");
  lines.refused("1 1 3 0 0 0 2.0 1 1", 13, "slot 'words': expected the number of values");
  lines.refused("1 1 3 0 0 0 1x 1", 13, "expected the number of values, found '1x'");
  lines.refused("1 1 3 0 0 0 2 5", 13, "slot 'words': expected no more values than the line has");
  lines.refused("1 1 3 0 0 0 9223372036854775807 5", 13, "than the line has left, 1 at most");
  lines.refused("1 1 3 0 0 0 99999999999999999999 5", 13, "expected the number of values");
  lines.refused("1 1 3 0 0 0 2 5      ", 22, "slot 'words': expected one more value, found the");
  lines.refused("1 1 3 0 0 0 1 5 6", 17, "expected the line's end after slot 'words', found '6'");
  CHECK_EQ(lines.records().count(), 0u);
}

TEST(data_multislot_bad_values_name_slot_and_column) {
  Lines lines(three_slots());
  lines.refused("1 one 3 0 0 0 0", 3, "slot 'click': expected an integer, found 'one'");
  lines.refused("1 1.0 3 0 0 0 0", 3, "slot 'click': expected an integer, found '1.0'");
  lines.refused("1 9223372036854775808 3 0 0 0 0", 3, "expected an integer that fits 64 bits");
  lines.refused("1 1 3 0 nan 0 0", 9, "slot 'dense': expected a finite number, found 'nan'");
  lines.refused("1 1 3 0 0 -inf 0", 11, "slot 'dense': expected a finite number, found '-inf'");
  lines.refused("1 1 3 0 1e39 0 0", 9, "expected a number that fits float32, found '1e39'");
  lines.refused("1 1 3 0 0,5 0 0", 9, "slot 'dense': expected a number, found '0,5'");
  lines.refused(std::string("1 1 3 0 0\0 0 0", 14), 9, "expected a number, found '0\\x00'");
  lines.refused("1 1 3 0 0 0 1 " + std::string(50, 'y'), 15,
                "found '" + std::string(40, 'y') + "' and 10 bytes more");
  lines.refused("1 1 3 0 0 0 1 5\r", 15, "expected an integer, found '5\\x0d'");
  CHECK(lines.row("1 1 3 0 0 0 0").ints[0][0] == 1);
}

TEST(data_schemas_that_do_not_fit_are_refused) {
  using cpudist::Error;
  const auto check = [](std::vector<Slot> slots, Format format = Format::kMultiSlot) {
    make_parser(schema_of(format, std::move(slots)));
  };
  check({ids("a")});
  CHECK_THROWS(check({}), Error);
  CHECK_THROWS(check({unused(ids("a"))}), Error);
  CHECK_THROWS(check({ids("a"), ids("a")}), Error);
  CHECK_THROWS(check({floats("a", 0)}), Error);
  CHECK_THROWS(check({hashed("a", 1)}), Error);
  CHECK_THROWS(check({hashed("a", 1ull << 63)}), Error);
  CHECK_THROWS(check({ids("a", 1u << 31)}), Error);
  CHECK_THROWS(check({from_columns(ids("a"), {"a"})}), Error);
  CHECK_THROWS(check({from_columns(ids("a", 2), {"a"})}, Format::kCsv), Error);
  CHECK_THROWS(check({ids("a")}, Format::kCsv), Error);
  Slot slot = floats("a", 1);
  slot.hash_range = 5;
  CHECK_THROWS(check({slot}), Error);
  slot = ids("a");
  slot.hex = true;
  check({slot}, Format::kCriteo);
  CHECK_THROWS(check({slot}), Error);
  Schema schema = schema_of(Format::kCsv, {from_columns(ids("a"), {"a"})});
  schema.separator = schema.delimiter;
  CHECK_THROWS(make_parser(schema), Error);
  schema.separator = '"';
  CHECK_THROWS(make_parser(schema), Error);
  schema.separator = ';';
  make_parser(schema);
  schema.instance_ids = true;
  CHECK_THROWS(make_parser(schema), Error);
}
