// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/snapshot/output.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/crc32c.h"
#include "base/errors.h"

namespace cpudist::server {
namespace {

constexpr mode_t kFileMode = 0666;  // less what the umask takes
// The checksum of so much has brought it into the cache that it is written from.
constexpr size_t kWriteBytes = 512u << 10;

std::string parent_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

void refuse_file(const std::string& call, const std::string& path) {
  const int cause = errno;
  throw Error(ErrorCode::kSnapshot,
              call + " " + path + ": " + std::generic_category().message(cause));
}

OutputFile::OutputFile(files::Calls& calls, const std::string& directory, wire::CutFile file)
    : calls_(calls),
      path_(directory + "/" + file.name),
      descriptor_(calls.open(path_, O_WRONLY | O_CREAT | O_TRUNC, kFileMode)),
      file_(std::move(file)) {
  if (descriptor_.get() < 0) refuse_file("open", path_);
}

void OutputFile::append(std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const auto next = bytes.first(std::min(bytes.size(), kWriteBytes));
    count(next);
    if (!write_all(calls_, descriptor_, next.data(), next.size())) refuse_file("write", path_);
    bytes = bytes.subspan(next.size());
  }
}

void OutputFile::count(std::span<const uint8_t> bytes) {
  file_.bytes += bytes.size();
  while (!bytes.empty()) {
    const size_t piece = std::min<uint64_t>(wire::kChecksumBytes - covered_, bytes.size());
    checksum_ = crc32c(bytes.data(), piece, checksum_);
    covered_ += piece;
    bytes = bytes.subspan(piece);
    if (covered_ < wire::kChecksumBytes) return;
    file_.checksums.push_back(std::exchange(checksum_, 0));
    covered_ = 0;
  }
}

void OutputFile::close() {
  if (covered_ > 0) file_.checksums.push_back(checksum_);
  calls_.begin_sync(descriptor_);
}

wire::CutFile OutputFile::finish() {
  if (!calls_.sync(descriptor_)) refuse_file("fsync", path_);
  descriptor_.reset();
  return std::move(file_);
}

void make_directories(files::Calls& calls, const std::string& path) {
  bool made = calls.make_directory(path);
  if (!made && errno == ENOENT && parent_of(path) != path) {
    make_directories(calls, parent_of(path));
    made = calls.make_directory(path);
  }
  if (!made && errno != EEXIST) refuse_file("mkdir", path);
  if (made) sync_directory(calls, parent_of(path));
}

void sync_directory(files::Calls& calls, const std::string& path) {
  const Descriptor directory = calls.open(path, O_RDONLY | O_DIRECTORY);
  if (directory.get() < 0) refuse_file("open", path);
  if (!calls.sync(directory)) refuse_file("fsync", path);
}

}  // namespace cpudist::server
