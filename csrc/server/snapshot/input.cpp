// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/snapshot/input.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "base/crc32c.h"
#include "base/errors.h"
#include "server/snapshot/output.h"
#include "wire/cut.h"

namespace cpudist::server {
namespace {

using wire::kChecksumBytes;

[[noreturn]] void refuse_content(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kSnapshotCorrupt, path + ": " + what);
}

std::string hexadecimal(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

class CheckedFile {
 public:
  CheckedFile(files::Calls& calls, std::string path, const wire::Load& load)
      : calls_(calls), path_(std::move(path)), load_(load), file_(calls.open(path_, O_RDONLY)) {
    if (file_.get() < 0) {
      if (errno == ENOENT) refuse_content(path_, "the file is missing");
      refuse_file("open", path_);
    }
    uint64_t found = 0;
    if (!calls.size_of(file_, &found)) refuse_file("fstat", path_);
    if (found == load.file_bytes) return;
    refuse_content(path_, "it has " + std::to_string(found) + " bytes, expected " +
                              std::to_string(load.file_bytes));
  }

  // Bytes begin .. end, with the whole pieces that they lie in; `*first` is at `begin`.
  std::unique_ptr<uint8_t[]> read(uint64_t begin, uint64_t end, const uint8_t** first) const {
    const uint64_t from = begin / kChecksumBytes * kChecksumBytes;
    const uint64_t to =
        std::min((end + kChecksumBytes - 1) / kChecksumBytes * kChecksumBytes, load_.file_bytes);
    std::unique_ptr<uint8_t[]> bytes(new uint8_t[to - from]);
    const ssize_t found = read_all_at(calls_, file_, bytes.get(), to - from, from);
    if (found < 0) refuse_file("read", path_);
    if (static_cast<uint64_t>(found) < to - from) refuse_content(path_, "it ends too early");
    for (uint64_t at = from; at < to; at += kChecksumBytes) {
      check(at / kChecksumBytes, bytes.get() + (at - from), std::min(kChecksumBytes, to - at));
    }
    *first = bytes.get() + (begin - from);
    return bytes;
  }

 private:
  void check(uint64_t piece, const uint8_t* bytes, uint64_t size_bytes) const {
    const uint32_t found = crc32c(bytes, size_bytes);
    if (found == load_.checksums[piece]) return;
    refuse_content(path_, "bytes " + std::to_string(piece * kChecksumBytes) + " .. " +
                              std::to_string(piece * kChecksumBytes + size_bytes) +
                              " have the checksum " + hexadecimal(found) + ", expected " +
                              hexadecimal(load_.checksums[piece]));
  }

  files::Calls& calls_;
  const std::string path_;
  const wire::Load& load_;
  const Descriptor file_;
};

}  // namespace

LoadedRows::LoadedRows(files::Calls& calls, const std::string& directory, const wire::Load& load,
                       const table::RecordShape& shape) {
  columns_.rows = load.row_end - load.row_begin;
  columns_.step = load.table_step;
  if (columns_.rows == 0) return;
  if (directory.empty()) {
    throw Error(ErrorCode::kSnapshot,
                "snapshot " + load.snapshot +
                    ": this server has no directory of snapshots; set "
                    "CPUDIST_SNAPSHOT_DIR where servers start, or give opt.resume() a path");
  }
  const CheckedFile file(calls, directory + "/" + load.snapshot + "/" + load.file, load);
  const auto read = [&](wire::LoadColumn column, uint64_t row_bytes, const uint8_t** place) {
    const auto number = static_cast<size_t>(column);
    const uint64_t offset = load.offsets[number];
    if (offset == 0 || row_bytes == 0) return;
    memory_[number] =
        file.read(offset + load.row_begin * row_bytes, offset + load.row_end * row_bytes, place);
  };
  read(wire::LoadColumn::kKeys, sizeof(int64_t), &columns_.keys);
  read(wire::LoadColumn::kWeight, shape.dim * sizeof(float), &columns_.weights);
  read(wire::LoadColumn::kState, shape.state_elements * sizeof(float), &columns_.state);
  read(wire::LoadColumn::kCount, sizeof(uint32_t), &columns_.counts);
  read(wire::LoadColumn::kLastSeen, sizeof(uint32_t), &columns_.last_seen);
  read(wire::LoadColumn::kAverage, shape.dim * sizeof(float), &columns_.averages);
}

}  // namespace cpudist::server
