// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// CSV lines and headers: quoting, missing cells, lists, and what is said of lines that are wrong.

#include "support/data_fixture.h"

using namespace cpudist::testing;  // NOLINT

namespace {

Schema flights() {
  Slot dense = from_columns(floats("dense", 2), {"distance", "hour"});
  dense.missing_float = 9.0f;
  Slot carrier = from_columns(hashed("carrier", 100, 1), {"carrier"});
  carrier.missing_int = 3;
  return schema_of(Format::kCsv, {from_columns(ids("label", 1), {"late"}), dense, carrier,
                                  from_columns(ids("stops"), {"stops"})});
}

int64_t carrier_id(const std::string& text) {
  return cpudist::data::hash_text(text.data(), text.size(), 2, 100);
}

std::string header_refusal(Lines& lines, const std::string& line) {
  try {
    lines.header(line);
  } catch (const cpudist::Error& error) {
    CHECK(error.code() == cpudist::ErrorCode::kBadRecord);
    return error.what();
  }
  return "";
}

void check_has(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) fail(__FILE__, __LINE__, text + ": no " + part);
}

}  // namespace

TEST(data_csv_columns_come_by_name) {
  Lines lines(flights());
  CHECK(lines.header("stops,carrier,ignored,hour,late,distance"));
  const Row expected{{{1}, {carrier_id("UA")}, {4, -5}}, {{2.5f, 7.0f}}, 0};
  CHECK(lines.row("4|-5,UA,what,7,1,2.5") == expected);
  CHECK(lines.row(" 4 | -5 ,UA,,\t7 , 1,2.5 ") == expected);
  CHECK(lines.row("\"4|-5\",\"UA\",\"a,b\",\"7\",\" 1\",\"2.5\"") == expected);
  CHECK(lines.row(",,,,,") == (Row{{{0}, {3}, {}}, {{9.0f, 9.0f}}, 0}));
  CHECK(lines.row(" ,\"\", , ,\" \",\t") == (Row{{{0}, {3}, {}}, {{9.0f, 9.0f}}, 0}));
}

TEST(data_csv_texts_are_taken_by_their_bytes) {
  Lines lines(flights());
  lines.header("\"late\",distance,hour,\"carrier\",stops");
  const auto carrier = [&](const std::string& cell) {
    return lines.row("1,1,1," + cell + ",").ints[1][0];
  };
  CHECK_EQ(carrier(" UA "), carrier_id(" UA "));
  CHECK_EQ(carrier("\"say \"\"hi\"\", UA\""), carrier_id("say \"hi\", UA"));
  CHECK_EQ(carrier("\"\"\"\"\"\""), carrier_id("\"\""));
  CHECK_EQ(carrier("5\" pipe"), carrier_id("5\" pipe"));
  CHECK_EQ(carrier(std::string("a\0b", 3)), carrier_id(std::string("a\0b", 3)));
}

TEST(data_csv_long_lists_grow_the_record) {
  Schema schema =
      schema_of(Format::kCsv, {from_columns(ids("a"), {"x"}), from_columns(ids("b"), {"x"}),
                               from_columns(ids("c"), {"x"}), from_columns(ids("d", 1), {"y"})});
  Lines lines(schema);
  lines.header("y,x");
  std::vector<int64_t> list;
  std::string text;
  for (int64_t i = 0; i < 2000; ++i) {
    list.push_back(i % 10);
    text += (i > 0 ? "|" : "") + std::to_string(i % 10);
  }
  CHECK(lines.row("6," + text) == (Row{{list, list, list, {6}}, {}, 0}));
}

TEST(data_csv_headers_that_do_not_fit_are_named) {
  Lines lines(flights());
  CHECK_THROWS(lines.parse("1,2"), cpudist::Error);
  check_has(header_refusal(lines, "late,distance,hour,stops"),
            "column 'carrier' of slot 'carrier' is missing; found 'late', 'distance'");
  check_has(header_refusal(lines, "late,late,distance,hour,carrier,stops"),
            "column 'late' of slot 'label' is there twice");
  check_has(header_refusal(lines, "late,\"distance"), "column 6: the quoted cell does not end");
  check_has(header_refusal(lines, ""), "column 'late' of slot 'label' is missing; found ''");
  CHECK(lines.header("late,x,x,distance,hour,carrier,stops"));
}

TEST(data_csv_bad_lines_name_slot_and_column) {
  Lines lines(flights());
  lines.header("late,distance,hour,carrier,stops");
  lines.refused("", 1, "expected 5 columns as in the header, found 1");
  lines.refused("1,2,3,x", 8, "expected 5 columns as in the header, found 4");
  lines.refused("1,2,3,x,,6,7", 10, "expected 5 columns as in the header, found 7");
  lines.refused("1,2,\"3,x,", 5, "line breaks inside cells are not supported");
  lines.refused("1,2,\"3\"\"", 5, "line breaks inside cells are not supported");
  lines.refused("1,2,\"3\"x,UA,", 8, "behind a closing quote, found 'x'");
  lines.refused("one,2,3,x,", 1, "slot 'label': expected an integer, found 'one'");
  lines.refused("1, two,3,x,", 4, "slot 'dense': expected a number, found 'two'");
  lines.refused("1,2,nan,x,", 5, "slot 'dense': expected a finite number, found 'nan'");
  lines.refused("1,2,\"3 4\",x,", 6, "slot 'dense': expected a number, found '3 4'");
  lines.refused("1,2,\"3\"\"\",x,", 5, "slot 'dense': expected a number, found '3\"'");
  lines.refused("1,2,3,x,1||2", 11, "slot 'stops': expected an integer, found nothing");
  lines.refused("1,2,3,x,1|", 11, "slot 'stops': expected an integer, found nothing");
  lines.refused("1,2,3,x,1|x|2", 11, "slot 'stops': expected an integer, found 'x'");
  lines.refused("9223372036854775808,2,3,x,", 1, "expected an integer that fits 64 bits");
  CHECK_EQ(lines.records().count(), 0u);
}

TEST(data_csv_delimiter_and_separator_are_the_schemas) {
  Schema schema = flights();
  schema.delimiter = '\t';
  schema.separator = ' ';
  Lines lines(schema);
  lines.header("late\tdistance\thour\tcarrier\tstops");
  CHECK(lines.row("1\t2\t3\ta,b\t5 6 7") ==
        (Row{{{1}, {carrier_id("a,b")}, {5, 6, 7}}, {{2, 3}}, 0}));
}
