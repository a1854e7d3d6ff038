// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// From a part of a file to records: opens what it comes from, takes its lines apart, parses them
// and reports those that are bad. Used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/parse/parser.h"
#include "data/parse/records.h"
#include "data/read/bad_lines.h"
#include "data/read/command_output.h"
#include "data/read/fed_queue.h"
#include "data/read/line_reader.h"

namespace cpudist::data {

// The lines of files[file] that start in [begin, end). Of a command's output and of what is fed:
// all, whatever begin and end.
struct Split {
  uint32_t file = 0;
  uint64_t begin = 0;
  uint64_t end = kNoEnd;
};

struct Input {
  std::vector<std::string> files;
  Command command;   // without a text files are read as they are
  bool fed = false;  // files are handed over by FedQueue, and `files` are their names only
  size_t line_limit_bytes = kLineLimitBytes;

  bool streams() const { return fed || !command.text.empty(); }
};

// Throws Error(kInvalidArgument): options that contradict each other, splits of no file.
void check_input(const Input& input, const std::vector<std::vector<Split>>& lanes);

class SplitReader {
 public:
  // All arguments outlive it. `fed` is null unless the input is fed.
  SplitReader(const Schema& schema, const Input& input, BadLines& bad_lines, Notices& notices,
              const StopSignal& stop, FedQueue* fed);

  // `position` is what position() was when reading stopped, or 0 for the beginning.
  void open(const Split& split, uint64_t position);
  // Appends records until there are `records` of them, or `words` words. False: the split has
  // ended; it is closed then. Throws Error.
  bool read(RecordBuffer& to, size_t records, size_t words = ~size_t{0});
  // Gives back what is open: a file, or a command, which is killed.
  void close() { lines_.close(); }
  // Behind the last line that was read. Of files: bytes of the file; of streams: lines or rows.
  uint64_t position() const;

 private:
  std::unique_ptr<ByteSource> source_of(uint64_t begin);
  void open_lines(uint64_t position);
  void take_header(LineReader& lines);
  void read_header();
  void skip_lines(uint64_t count);
  void open_columns(uint64_t position);
  bool read_line(RecordBuffer& to);
  bool read_row(RecordBuffer& to);
  bool next_chunk();
  void bad_line(const Line& line);
  uint64_t line_number();

  const Schema& schema_;
  const Input& input_;
  BadLines& bad_lines_;
  Notices& notices_;
  const StopSignal& stop_;
  FedQueue* fed_;
  std::unique_ptr<Parser> parser_;
  LineReader lines_;
  LineError error_;
  Split split_;
  uint64_t lines_read_ = 0;    // since it was opened; of streams: since their beginning
  uint64_t lines_before_ = 0;  // of the file, before the first that was read; once it is known
  uint64_t first_line_ = 0;    // bytes of the file before the first that was read
  bool counted_ = false;
  bool columns_ = false;
  ColumnRecords chunk_;
  size_t chunk_row_ = 0;
  size_t chunk_bad_ = 0;  // of the bad rows, those that were passed
};

}  // namespace cpudist::data
