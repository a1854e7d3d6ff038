// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The calls of base/files.h behind an object, for whoever must be right whatever they do: a test
// gives another one, which fails or ends at a call of its choice.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/descriptor.h"

namespace cpudist::files {

// Each is the call of its name: where it fails, errno says why. Paths are relative to none.
//
// Thread safety: all members.
class Calls {
 public:
  Calls() = default;
  virtual ~Calls() = default;
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  virtual Descriptor open(const std::string& path, int flags, mode_t mode = 0) = 0;
  virtual bool size_of(const Descriptor& file, uint64_t* size_bytes) = 0;
  // Bytes read, 0 at the end, -1.
  virtual ssize_t read_at(const Descriptor& file, void* to, size_t size_bytes, uint64_t offset) = 0;
  // Bytes written, which may be fewer than there are, or -1.
  virtual ssize_t write(const Descriptor& file, const void* from, size_t size_bytes) = 0;
  // A hint: what was written is wanted on the disk soon. Nobody waits, and nothing fails.
  virtual void begin_sync(const Descriptor& file) = 0;
  // What was written, or the entries of a directory, lie on the disk.
  virtual bool sync(const Descriptor& file) = 0;
  virtual bool make_directory(const std::string& path) = 0;
  virtual bool remove(const std::string& path) = 0;            // a file
  virtual bool remove_directory(const std::string& path) = 0;  // an empty one
};

// Those of the system.
std::shared_ptr<Calls> system_calls();

// All of it, in as many calls as that takes. False with errno set; some may be written then.
bool write_all(Calls& calls, const Descriptor& file, const void* from, size_t size_bytes);
// Bytes read: fewer than wanted only at the end of the file. -1 with errno set.
ssize_t read_all_at(Calls& calls, const Descriptor& file, void* to, size_t size_bytes,
                    uint64_t offset);

}  // namespace cpudist::files
