// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Files of the file system, and the only place that opens, reads or writes one. Each function is
// the system call of its name, begun again after a signal: it fails with errno set, and the caller
// says what that means.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/descriptor.h"

namespace cpudist::files {

// Closed in programs that this one starts. Its number is below 0 when there is no opening it.
inline Descriptor open(const std::string& path, int flags, mode_t mode = 0) {
  int number = -1;
  do {
    number = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (number < 0 && errno == EINTR);
  return Descriptor(number);
}

inline bool read_status(const Descriptor& file, struct stat* status) {
  return ::fstat(file.get(), status) == 0;
}

// Bytes read, 0 at the end, -1.
inline ssize_t read_at(const Descriptor& file, void* to, size_t size_bytes, uint64_t offset) {
  ssize_t found = 0;
  do {
    found = ::pread(file.get(), to, size_bytes, static_cast<off_t>(offset));
  } while (found < 0 && errno == EINTR);
  return found;
}

// Bytes written, which may be fewer than there are, or -1.
inline ssize_t write(const Descriptor& file, const void* from, size_t size_bytes) {
  ssize_t count = 0;
  do {
    count = ::write(file.get(), from, size_bytes);
  } while (count < 0 && errno == EINTR);
  return count;
}

// What was written lies on the disk, or the entries of a directory do.
inline bool sync(const Descriptor& file) {
  int failed = 0;
  do {
    failed = ::fsync(file.get());
  } while (failed != 0 && errno == EINTR);
  return failed == 0;
}

// What was written is sent to the disk, where the file system knows how; nobody waits for it.
inline void begin_sync(const Descriptor& file) {
  static_cast<void>(::sync_file_range(file.get(), 0, 0, SYNC_FILE_RANGE_WRITE));
}

// The whole of a small file, such as those of /proc; empty when it cannot be read.
inline std::string read_text(const std::string& path) {
  const Descriptor file = open(path, O_RDONLY);
  std::string text;
  char piece[512];
  while (file.get() >= 0) {
    const ssize_t found = read_at(file, piece, sizeof piece, text.size());
    if (found <= 0) break;
    text.append(piece, static_cast<size_t>(found));
  }
  return text;
}

}  // namespace cpudist::files
