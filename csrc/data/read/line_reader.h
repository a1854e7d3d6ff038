// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Lines out of a byte source: those that start in [begin, end), each once, whatever the cuts
// between splits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "data/parse/parser.h"
#include "data/read/byte_source.h"

namespace cpudist::data {

inline constexpr size_t kLineLimitBytes = 16 << 20;

struct Line {
  // Without its end ("\n" or "\r\n"); kLinePadding bytes behind it can be read. Valid until the
  // next call. Empty when the line is too long.
  std::string_view text;
  // Without "\n" only.
  std::string_view raw;
  uint64_t begin = 0;       // bytes of the file before it
  uint64_t size_bytes = 0;  // with its end
  bool too_long = false;
};

// Nothing, or only spaces and carriage returns.
inline bool is_blank(std::string_view text) {
  for (const char c : text) {
    if (c != ' ' && c != '\r') return false;
  }
  return true;
}

// Memory: 256 KiB, more only for longer lines, and never above line_limit_bytes and a little.
class LineReader {
 public:
  struct Options {
    uint64_t begin = 0;
    uint64_t end = kNoEnd;
    size_t line_limit_bytes = kLineLimitBytes;
  };

  explicit LineReader(size_t buffer_bytes = 256 << 10);

  // Begins anew. The source's first byte is the file's byte `source_begin(options.begin)`.
  void open(std::unique_ptr<ByteSource> source, const Options& options);
  void close() { source_.reset(); }
  // A line before is looked at, to see whether one starts at `begin`.
  static uint64_t source_begin(uint64_t begin) { return begin == 0 ? 0 : begin - 1; }

  // False at the end. Throws what the source throws.
  bool next(Line& line);
  // Bytes of the file before the line that next() will give.
  uint64_t offset() const { return started_ ? buffer_offset_ + pos_ : options_.begin; }
  size_t memory_bytes() const { return capacity_; }

 private:
  bool fill();  // reads more behind filled_; false at the end of the source
  void make_room();
  size_t find_end(size_t from);  // of the line at pos_; kNotFound: longer than the limit
  void skip_line();
  void skip_first();
  void drop_byte_order_mark();

  std::unique_ptr<ByteSource> source_;
  Options options_;
  std::unique_ptr<char[]> buffer_;
  size_t base_bytes_;
  size_t capacity_ = 0;
  uint64_t buffer_offset_ = 0;  // of buffer_[0] in the file
  size_t pos_ = 0;
  size_t filled_ = 0;
  size_t mark_bytes_ = 0;  // of a byte order mark that was dropped
  bool at_end_ = false;
  bool started_ = false;
};

}  // namespace cpudist::data
