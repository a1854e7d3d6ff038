// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "base/file_calls.h"

#include <cstdio>

#include "base/files.h"

namespace cpudist::files {
namespace {

constexpr mode_t kDirectoryMode = 0777;  // less what the umask takes

class SystemCalls final : public Calls {
 public:
  Descriptor open(const std::string& path, int flags, mode_t mode) override {
    return files::open(path, flags, mode);
  }
  bool size_of(const Descriptor& file, uint64_t* size_bytes) override {
    struct stat status{};
    if (!read_status(file, &status)) return false;
    *size_bytes = static_cast<uint64_t>(status.st_size);
    return true;
  }
  ssize_t read_at(const Descriptor& file, void* to, size_t size_bytes, uint64_t offset) override {
    return files::read_at(file, to, size_bytes, offset);
  }
  ssize_t write(const Descriptor& file, const void* from, size_t size_bytes) override {
    return files::write(file, from, size_bytes);
  }
  void begin_sync(const Descriptor& file) override { files::begin_sync(file); }
  bool sync(const Descriptor& file) override { return files::sync(file); }
  bool make_directory(const std::string& path) override {
    return ::mkdir(path.c_str(), kDirectoryMode) == 0;
  }
  bool remove(const std::string& path) override { return ::unlink(path.c_str()) == 0; }
  bool remove_directory(const std::string& path) override { return ::rmdir(path.c_str()) == 0; }
};

}  // namespace

std::shared_ptr<Calls> system_calls() { return std::make_shared<SystemCalls>(); }

bool write_all(Calls& calls, const Descriptor& file, const void* from, size_t size_bytes) {
  const auto* next = static_cast<const uint8_t*>(from);
  while (size_bytes > 0) {
    const ssize_t written = calls.write(file, next, size_bytes);
    if (written < 0) return false;
    if (written == 0) {
      errno = ENOSPC;  // a device that takes nothing and does not say why
      return false;
    }
    next += written;
    size_bytes -= static_cast<size_t>(written);
  }
  return true;
}

ssize_t read_all_at(Calls& calls, const Descriptor& file, void* to, size_t size_bytes,
                    uint64_t offset) {
  size_t done = 0;
  while (done < size_bytes) {
    const ssize_t found =
        calls.read_at(file, static_cast<uint8_t*>(to) + done, size_bytes - done, offset + done);
    if (found < 0) return -1;
    if (found == 0) break;
    done += static_cast<size_t>(found);
  }
  return static_cast<ssize_t>(done);
}

}  // namespace cpudist::files
