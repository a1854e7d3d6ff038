// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// From a line of text to a record. One parser per thread: parsers have scratch memory.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "data/parse/records.h"
#include "data/parse/schema.h"

namespace cpudist::data {

// Bytes behind the end of a line that may be read, whatever they are.
inline constexpr size_t kLinePadding = 64;

struct LineError {
  size_t column = 0;    // 1-based byte of the line where it went wrong
  std::string message;  // what was expected and found, with the slot's name; no file, no line
};

class Parser {
 public:
  virtual ~Parser() = default;
  // Appends the record of a line, which comes without its line end ("\n" or "\r\n"). False: the
  // buffer is as before and `error` says why. kLinePadding bytes behind the line can be read.
  virtual bool parse(std::string_view line, RecordBuffer& records, LineError& error) = 0;
  // kCsv: takes a file's first line; to be called once per file, before parse. Others: false, the
  // file has no header. Throws Error(kBadRecord) if a column is missing or named twice.
  virtual bool header(std::string_view line) {
    static_cast<void>(line);
    return false;
  }
};

// The schema is copied.
std::unique_ptr<Parser> make_parser(const Schema& schema);

}  // namespace cpudist::data
