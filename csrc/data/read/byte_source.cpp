// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/byte_source.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>

#include "base/files.h"

namespace cpudist::data {

namespace {

constexpr size_t kTailBytes = 16 << 10;
constexpr size_t kCountBytes = 256 << 10;

}  // namespace

std::string system_text(int error_number) { return std::generic_category().message(error_number); }

Descriptor open_regular(const std::string& path) {
  Descriptor file = files::open(path, O_RDONLY | O_NONBLOCK);
  struct stat status;
  if (file.get() < 0 || !files::read_status(file, &status)) {
    throw Error(ErrorCode::kDataFile, "cannot open " + path + ": " + system_text(errno));
  }
  if (!S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::kDataFile, path +
                                          " is not a regular file; give a file, or a command that "
                                          "writes what is to be read");
  }
  return file;
}

FileRange::FileRange(const std::string& path, uint64_t begin, uint64_t end, const StopSignal& stop)
    : path_(path), file_(open_regular(path)), offset_(begin), end_(end), stop_(stop) {}

size_t FileRange::read(char* to, size_t size) {
  stop_.check();
  const uint64_t wanted = offset_ < end_ ? std::min<uint64_t>(size, end_ - offset_)
                                         : std::min<uint64_t>(size, kTailBytes);
  const ssize_t found = files::read_at(file_, to, wanted, offset_);
  if (found < 0) {
    throw Error(ErrorCode::kDataFile, "cannot read " + path_ + " at byte " +
                                          std::to_string(offset_) + ": " + system_text(errno));
  }
  if (found == 0 && end_ != kNoEnd && offset_ < end_) {
    throw Error(ErrorCode::kDataFile, path_ + " has shrunk: it ends at or before byte " +
                                          std::to_string(offset_) + ", expected at least " +
                                          std::to_string(end_) +
                                          " bytes; leave files alone while they are read");
  }
  offset_ += static_cast<uint64_t>(found);
  return static_cast<size_t>(found);
}

uint64_t count_newlines(const std::string& path, uint64_t begin, uint64_t end,
                        const StopSignal& stop) {
  FileRange range(path, begin, end, stop);
  const auto buffer = std::make_unique_for_overwrite<char[]>(kCountBytes);
  uint64_t lines = 0;
  uint64_t left = end - begin;
  while (left > 0) {
    const size_t found = range.read(buffer.get(), std::min<uint64_t>(left, kCountBytes));
    lines += static_cast<uint64_t>(std::count(buffer.get(), buffer.get() + found, '\n'));
    left -= found;
  }
  return lines;
}

}  // namespace cpudist::data
