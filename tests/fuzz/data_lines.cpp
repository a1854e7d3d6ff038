// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Lines of any bytes: refused with a place and a reason and without a trace, or made into a record
// that is sound and equal to what a slow parser reads. The first byte chooses format and schema.

#include <cstring>
#include <string_view>

#include "base/errors.h"
#include "data/parse/parser.h"
#include "data_schemas.h"
#include "slow_parser.h"

using namespace cpudist;  // NOLINT

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

struct Reader {
  explicit Reader(const data::Schema& made) : schema(made), parser(make_parser(made)) {}
  const data::Schema& schema;
  std::unique_ptr<data::Parser> parser;
  data::RecordBuffer records;
  bool headed = false;
};

std::vector<Reader>& readers() {
  static std::vector<Reader> all = [] {
    std::vector<Reader> made;
    for (const data::Schema& schema : fuzz::schemas()) made.emplace_back(schema);
    return made;
  }();
  return all;
}

// False: there is no header to read the other lines by.
bool take_header(Reader& reader, std::string_view line) {
  if (reader.schema.format != data::Format::kCsv || reader.headed) return true;
  try {
    reader.headed = reader.parser->header(line);
  } catch (const Error& error) {
    fuzz::require(error.code() == ErrorCode::kBadRecord, "headers are bad records");
  }
  return false;
}

void take_line(Reader& reader, std::string_view line) {
  data::RecordBuffer& records = reader.records;
  const size_t count = records.count();
  const size_t words = records.size_words();
  data::LineError error;
  const bool taken = reader.parser->parse(line, records, error);
  const bool known = reader.schema.format != data::Format::kCsv;
  std::vector<uint64_t> expected;
  const bool expected_taken = known && fuzz::parse_slowly(reader.schema, line, expected);
  fuzz::require(!known || taken == expected_taken, "both parsers take the same lines");
  if (!taken) {
    fuzz::require(records.count() == count && records.size_words() == words, "nothing is left");
    fuzz::require(error.column >= 1 && error.column <= line.size() + 1, "the column is the line's");
    fuzz::require(!error.message.empty(), "there is a reason");
    return;
  }
  fuzz::require(records.count() == count + 1, "a line is one record");
  const uint64_t* record = records.record(count);
  const size_t size = data::record_words(record);
  fuzz::require(records.size_words() == words + size, "the record is as large as it says");
  fuzz::require(!known || std::equal(expected.begin(), expected.end(), record, record + size),
                "both parsers read the same");
}

// A copy that ends where the records end, which the sanitizer guards.
void check_all(const Reader& reader) {
  const data::RecordBuffer& records = reader.records;
  if (records.count() == 0) return;
  const auto words = std::make_unique<uint64_t[]>(records.size_words());
  std::memcpy(words.get(), records.record(0), records.size_words() * sizeof(uint64_t));
  const size_t found = data::check_records(reader.schema, {words.get(), records.size_words()});
  fuzz::require(found == records.count(), "records of lines are sound");
  std::vector<const uint64_t*> pointers;
  for (size_t at = 0; at < records.size_words(); at += data::record_words(&words[at])) {
    pointers.push_back(&words[at]);
  }
  fuzz::check_batch(reader.schema, pointers);
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  Reader& reader = readers()[data[0] % readers().size()];
  reader.headed = false;
  reader.records.clear();
  // What may be read behind the last line, and no more.
  std::vector<char> text(data + 1, data + size);
  text.resize(text.size() + data::kLinePadding, '1');
  std::string_view left(text.data(), size - 1);
  while (!left.empty()) {
    const size_t end = std::min(left.find('\n'), left.size());
    const std::string_view line = left.substr(0, end);
    if (take_header(reader, line)) take_line(reader, line);
    if (reader.schema.format == data::Format::kCsv && !reader.headed) break;
    left.remove_prefix(std::min(end + 1, left.size()));
  }
  check_all(reader);
  return 0;
}
