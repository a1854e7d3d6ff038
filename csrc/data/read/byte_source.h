// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Where the bytes of a split come from. One thread reads; the end of the file, of the command's
// output or of what is fed is the end of the source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/descriptor.h"
#include "data/read/waiting.h"

namespace cpudist::data {

inline constexpr uint64_t kNoEnd = ~uint64_t{0};

// "No such file or directory" of errno.
std::string system_text(int error_number);

// For reading. Throws Error(kDataFile): missing, not readable, not a regular file.
Descriptor open_regular(const std::string& path);

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Up to `size` > 0 bytes; 0 at the end, and only there. Throws Error: kDataFile, or kClosed
  // soon after the reader's stop signal.
  virtual size_t read(char* to, size_t size) = 0;
};

// The bytes of a regular file from `begin` on. Behind `end`, up to which there must be bytes unless
// it is kNoEnd, it reads in small pieces: only the rest of one line is wanted.
class FileRange : public ByteSource {
 public:
  FileRange(const std::string& path, uint64_t begin, uint64_t end, const StopSignal& stop);
  size_t read(char* to, size_t size) override;

 private:
  std::string path_;
  Descriptor file_;
  uint64_t offset_;
  uint64_t end_;
  const StopSignal& stop_;
};

// Newlines in the bytes [begin, end) of a file. Costs reading them.
uint64_t count_newlines(const std::string& path, uint64_t begin, uint64_t end,
                        const StopSignal& stop);

}  // namespace cpudist::data
