// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Files of a snapshot as they are written: from the beginning to the end, with the checksums that
// the manifest has, and on the disk only when finish() says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/file_calls.h"
#include "wire/cut.h"

namespace cpudist::server {

// Throws Error(kSnapshot) with the call, the path and what errno says.
[[noreturn]] void refuse_file(const std::string& call, const std::string& path);

// Thread safety: one caller at a time. All but the destructor throw Error(kSnapshot).
class OutputFile {
 public:
  // Made, or emptied: what lies there under that name was never part of a snapshot. `file` is what
  // the trainers are told of it.
  OutputFile(files::Calls& calls, const std::string& directory, wire::CutFile file);

  void append(std::span<const uint8_t> bytes);
  // All of it was appended: the disk may begin.
  void close();
  // Returns when it lies on the disk.
  wire::CutFile finish();

 private:
  void count(std::span<const uint8_t> bytes);

  files::Calls& calls_;
  const std::string path_;
  Descriptor descriptor_;
  wire::CutFile file_;
  uint32_t checksum_ = 0;  // of what is behind the last whole piece
  uint64_t covered_ = 0;   // bytes of that
};

// Makes what is missing of a path of directories, and what was made lies on the disk. Throws
// Error(kSnapshot).
void make_directories(files::Calls& calls, const std::string& path);
// What was made or removed in a directory lies on the disk. Throws Error(kSnapshot).
void sync_directory(files::Calls& calls, const std::string& path);

}  // namespace cpudist::server
