// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/parse/csv_cells.h"

#include <cstring>

namespace cpudist::data {

bool CsvCells::cut(std::string_view line, LineError& error) {
  line_ = line;
  cells_.clear();
  copies_size_ = 0;
  const char* const end = line.data() + line.size();
  for (const char* at = line.data();; ++at) {
    if (at != end && *at == '"') {
      if (!quoted_cell(at, error)) return false;
    } else {
      const char* const begin = at;
      at = plain_end(at);
      cells_.push_back({{begin, static_cast<size_t>(at - begin)}, begin, false});
    }
    if (at == end) return true;
  }
}

const char* CsvCells::plain_end(const char* at) const {
  const char* const end = line_.data() + line_.size();
  const uint64_t delimiters = kEachByte * static_cast<unsigned char>(delimiter_);
  while (end - at >= 8) {
    const uint64_t others = load8(at) ^ delimiters;
    // A borrow only reaches bytes behind the first delimiter.
    const uint64_t found = (others - kEachByte) & ~others & (kEachByte * 0x80);
    if (found != 0) return at + static_cast<size_t>(std::countr_zero(found)) / 8;
    at += 8;
  }
  while (at < end && *at != delimiter_) ++at;
  return at;
}

bool CsvCells::quoted_cell(const char*& at, LineError& error) {
  const char* const end = line_.data() + line_.size();
  const char* const open = at;
  bool escaped = false;
  for (const char* quote = at + 1;; quote += 2) {
    quote = static_cast<const char*>(std::memchr(quote, '"', static_cast<size_t>(end - quote)));
    if (quote == nullptr) {
      return fail(line_, open,
                  "the quoted cell does not end on its line; line breaks inside cells are not "
                  "supported",
                  error);
    }
    if (quote + 1 != end && quote[1] == '"') {
      escaped = true;
      continue;
    }
    at = quote + 1;
    break;
  }
  if (at != end && *at != delimiter_) {
    const std::string_view found(at, static_cast<size_t>(plain_end(at) - at));
    return fail(
        line_, at,
        "expected the delimiter or the line's end behind a closing quote, found " + excerpt(found),
        error);
  }
  const char* const close = at - 1;
  const std::string_view text =
      escaped ? unescape(open + 1, close)
              : std::string_view(open + 1, static_cast<size_t>(close - open - 1));
  cells_.push_back({text, open, escaped});
  return true;
}

std::string_view CsvCells::unescape(const char* begin, const char* end) {
  if (copies_size_ == 0 && line_.size() + kLinePadding > copies_capacity_) {
    copies_capacity_ = line_.size() + kLinePadding;
    copies_ = std::make_unique<char[]>(copies_capacity_);
  }
  char* const copy = copies_.get() + copies_size_;
  char* next = copy;
  for (; begin < end; ++begin) {
    *next++ = *begin;
    if (*begin == '"') ++begin;
  }
  const auto size = static_cast<size_t>(next - copy);
  copies_size_ += size;
  return {copy, size};
}

}  // namespace cpudist::data
