// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A CSV line cut into cells: RFC 4180 quoting, without line breaks inside cells.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "data/parse/line.h"

namespace cpudist::data {

struct Cell {
  std::string_view text;  // without quotes, `""` as one quote
  const char* begin;      // where it begins in the line
  bool escaped = false;   // the text is a copy: its bytes have no place in the line
};

class CsvCells {
 public:
  explicit CsvCells(char delimiter) : delimiter_(delimiter) {}

  // Cells are valid until the next call. False: `error` says what is wrong.
  bool cut(std::string_view line, LineError& error);
  const std::vector<Cell>& cells() const { return cells_; }

 private:
  const char* plain_end(const char* at) const;
  bool quoted_cell(const char*& at, LineError& error);
  std::string_view unescape(const char* begin, const char* end);

  char delimiter_;
  std::vector<Cell> cells_;
  std::string_view line_;
  // Copies of the line's escaped cells; as large as the line, so that it never moves.
  std::unique_ptr<char[]> copies_;
  size_t copies_capacity_ = 0;
  size_t copies_size_ = 0;
};

}  // namespace cpudist::data
