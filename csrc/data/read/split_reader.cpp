// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/split_reader.h"

#include <algorithm>
#include <utility>

namespace cpudist::data {

namespace {

bool is_blank_line(const Line& line) {
  const auto& text = line.text;
  return text.empty() || ((text[0] == ' ' || text[0] == '\r') && is_blank(text));
}

}  // namespace

void check_input(const Input& input, const std::vector<std::vector<Split>>& lanes) {
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::kInvalidArgument, text);
  };
  if (lanes.empty()) refuse("a reader needs at least one lane");
  if (input.line_limit_bytes == 0) refuse("line_limit_bytes must be at least 1");
  if (input.fed && !input.command.text.empty()) {
    refuse("a reader is fed, or reads from a command, not both");
  }
  if (!(input.command.timeout_s > 0)) refuse("command_timeout_s must be above 0");
  for (const auto& lane : lanes) {
    for (const Split& split : lane) {
      if (split.file < input.files.size() && split.begin <= split.end) continue;
      refuse("a split is of file " + std::to_string(split.file) + " of " +
             std::to_string(input.files.size()) + ", bytes " + std::to_string(split.begin) +
             " to " + std::to_string(split.end));
    }
  }
}

SplitReader::SplitReader(const Schema& schema, const Input& input, BadLines& bad_lines,
                         Notices& notices, const StopSignal& stop, FedQueue* fed)
    : schema_(schema),
      input_(input),
      bad_lines_(bad_lines),
      notices_(notices),
      stop_(stop),
      fed_(fed),
      parser_(make_parser(schema)) {}

void SplitReader::open(const Split& split, uint64_t position) {
  split_ = split;
  lines_read_ = 0;
  columns_ = input_.fed && fed_->next_is_columns();
  if (columns_) {
    open_columns(position);
  } else {
    open_lines(position);
  }
}

std::unique_ptr<ByteSource> SplitReader::source_of(uint64_t begin) {
  const std::string& path = input_.files[split_.file];
  if (input_.fed) return std::make_unique<FedBytes>(*fed_, path);
  if (!input_.command.text.empty()) {
    return std::make_unique<CommandOutput>(input_.command, path, stop_, notices_);
  }
  return std::make_unique<FileRange>(path, LineReader::source_begin(begin), split_.end, stop_);
}

void SplitReader::open_lines(uint64_t position) {
  const bool streams = input_.streams();
  LineReader::Options options;
  options.line_limit_bytes = input_.line_limit_bytes;
  if (!streams) {
    options.begin = std::max(position, split_.begin);
    options.end = split_.end;
  }
  counted_ = options.begin == 0;
  lines_before_ = 0;
  lines_.open(source_of(options.begin), options);
  if (schema_.format == Format::kCsv) {
    if (options.begin == 0) {
      take_header(lines_);
    } else {
      read_header();
    }
  }
  if (streams && position > lines_read_) skip_lines(position - lines_read_);
}

// A header that does not fit is an error whatever the policy: no line of the file can be read.
void SplitReader::take_header(LineReader& lines) {
  Line line;
  if (!lines.next(line)) return;
  ++lines_read_;
  const std::string& path = input_.files[split_.file];
  if (line.too_long) {
    throw Error(ErrorCode::kBadRecord, path + ":1:1: the header is longer than " +
                                           std::to_string(input_.line_limit_bytes) + " bytes");
  }
  try {
    parser_->header(line.text);
  } catch (const Error& error) {
    throw Error(error.code(), path + ":1: " + error.what());
  }
}

void SplitReader::read_header() {
  LineReader lines;
  LineReader::Options options;
  options.line_limit_bytes = input_.line_limit_bytes;
  const std::string& path = input_.files[split_.file];
  lines.open(std::make_unique<FileRange>(path, 0, kNoEnd, stop_), options);
  take_header(lines);
  lines_read_ = 0;
}

void SplitReader::skip_lines(uint64_t count) {
  Line line;
  for (; count > 0 && lines_.next(line); --count) ++lines_read_;
}

void SplitReader::open_columns(uint64_t position) {
  chunk_ = {};
  chunk_row_ = chunk_bad_ = 0;
  while (lines_read_ < position) {
    if (chunk_row_ == chunk_.rows && !next_chunk()) return;
    const bool bad = chunk_bad_ < chunk_.bad.size() && chunk_.bad[chunk_bad_].row == chunk_row_;
    if (bad) ++chunk_bad_;
    ++chunk_row_;
    ++lines_read_;
  }
}

bool SplitReader::read(RecordBuffer& to, size_t records, size_t words) {
  while (to.count() < records && to.size_words() < words) {
    if (columns_ ? read_row(to) : read_line(to)) continue;
    lines_.close();
    return false;
  }
  return true;
}

bool SplitReader::read_line(RecordBuffer& to) {
  Line line;
  if (!lines_.next(line)) return false;
  if (lines_read_++ == 0) first_line_ = line.begin;
  if (line.too_long) {
    error_.column = 1;
    error_.message = "the line has " + std::to_string(line.size_bytes) +
                     " bytes, expected at most " + std::to_string(input_.line_limit_bytes);
    bad_line(line);
  } else if (!is_blank_line(line) && !parser_->parse(line.text, to, error_)) {
    bad_line(line);
  }
  return true;
}

bool SplitReader::next_chunk() {
  do {
    std::optional<ColumnRecords> chunk = next_columns(*fed_, input_.files[split_.file]);
    if (!chunk) return false;
    chunk_ = std::move(*chunk);
  } while (chunk_.rows == 0);
  chunk_row_ = chunk_bad_ = 0;
  return true;
}

bool SplitReader::read_row(RecordBuffer& to) {
  if (chunk_row_ == chunk_.rows && !next_chunk()) return false;
  const size_t row = chunk_row_++;
  ++lines_read_;
  if (chunk_bad_ == chunk_.bad.size() || chunk_.bad[chunk_bad_].row != row) {
    to.append(chunk_.records.record(row - chunk_bad_));
    return true;
  }
  const BadRow& bad = chunk_.bad[chunk_bad_++];
  bad_lines_.report(split_.file, input_.files[split_.file], lines_read_, {1, bad.message}, {},
                    false);
  return true;
}

uint64_t SplitReader::position() const { return input_.streams() ? lines_read_ : lines_.offset(); }

void SplitReader::bad_line(const Line& line) {
  const uint32_t file = split_.file;
  const uint64_t number = bad_lines_.needs_number(file) ? line_number() : 0;
  bad_lines_.report(file, input_.files[file], number, error_, line.raw, !line.too_long);
}

uint64_t SplitReader::line_number() {
  if (!counted_) {
    lines_before_ =
        bad_lines_.lines_before(split_.file, input_.files[split_.file], first_line_, stop_);
    counted_ = true;
  }
  return lines_before_ + lines_read_;
}

}  // namespace cpudist::data
