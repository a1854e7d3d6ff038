// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/line_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cpudist::data {

namespace {

constexpr size_t kTooLong = ~size_t{0};
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

}  // namespace

LineReader::LineReader(size_t buffer_bytes) : base_bytes_(std::max<size_t>(buffer_bytes, 16)) {}

void LineReader::open(std::unique_ptr<ByteSource> source, const Options& options) {
  source_ = std::move(source);
  options_ = options;
  if (capacity_ != base_bytes_) {
    // The padding is never written by a read: it is cleared for whoever looks at it.
    buffer_ = std::make_unique<char[]>(base_bytes_ + kLinePadding);
    capacity_ = base_bytes_;
  }
  buffer_offset_ = source_begin(options.begin);
  pos_ = 0;
  filled_ = 0;
  at_end_ = false;
  started_ = false;
  mark_bytes_ = 0;
}

bool LineReader::next(Line& line) {
  if (!started_) {
    started_ = true;
    if (options_.begin == 0) {
      drop_byte_order_mark();
    } else {
      skip_first();
    }
  }
  // The line behind a byte order mark starts where the mark does.
  if (offset() != mark_bytes_ ? offset() >= options_.end : options_.end == 0) return false;
  if (pos_ == filled_ && !fill()) return false;
  line.begin = offset();
  const size_t end = find_end(pos_);
  if (end == kTooLong) {
    skip_line();
    line.text = line.raw = {};
    line.too_long = true;
    line.size_bytes = offset() - line.begin;
    return true;
  }
  line.raw = {buffer_.get() + pos_, end - pos_};
  line.text = line.raw;
  if (line.text.ends_with('\r')) line.text.remove_suffix(1);
  line.too_long = false;
  pos_ = std::min(end + 1, filled_);
  line.size_bytes = offset() - line.begin;
  return true;
}

bool LineReader::fill() {
  if (at_end_) return false;
  make_room();
  const size_t found = source_->read(buffer_.get() + filled_, capacity_ - filled_);
  filled_ += found;
  at_end_ = found == 0;
  return !at_end_;
}

void LineReader::make_room() {
  if (pos_ > 0) {
    std::memmove(buffer_.get(), buffer_.get() + pos_, filled_ - pos_);
    buffer_offset_ += pos_;
    filled_ -= pos_;
    pos_ = 0;
  }
  if (filled_ < capacity_) return;
  const size_t larger = capacity_ * 2;
  auto buffer = std::make_unique<char[]>(larger + kLinePadding);
  std::memcpy(buffer.get(), buffer_.get(), filled_);
  buffer_ = std::move(buffer);
  capacity_ = larger;
}

size_t LineReader::find_end(size_t from) {
  const size_t limit = options_.line_limit_bytes;
  while (true) {
    const void* found = std::memchr(buffer_.get() + from, '\n', filled_ - from);
    const size_t end = found == nullptr
                           ? filled_
                           : static_cast<size_t>(static_cast<const char*>(found) - buffer_.get());
    if (end - pos_ > limit) return kTooLong;
    if (found != nullptr) return end;
    const size_t searched = filled_ - pos_;
    if (!fill()) return filled_;
    from = pos_ + searched;
  }
}

// What was read of the line goes before more is read, so that the buffer does not grow.
void LineReader::skip_line() {
  while (true) {
    const void* found = std::memchr(buffer_.get() + pos_, '\n', filled_ - pos_);
    if (found != nullptr) {
      pos_ = static_cast<size_t>(static_cast<const char*>(found) - buffer_.get()) + 1;
      return;
    }
    pos_ = filled_;
    if (!fill()) return;
  }
}

// The line that holds the byte before `begin` belongs to the split before.
void LineReader::skip_first() {
  if (fill()) skip_line();
}

void LineReader::drop_byte_order_mark() {
  while (filled_ < kByteOrderMark.size() && fill()) {
  }
  const std::string_view start(buffer_.get(), filled_);
  if (start.starts_with(kByteOrderMark)) pos_ = mark_bytes_ = kByteOrderMark.size();
}

}  // namespace cpudist::data
