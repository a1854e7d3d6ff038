// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of a snapshot on their way back: trainer 0 tells each server which rows of which file are
// its own, and the server reads them from its directory of snapshots.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "wire/layout.h"

namespace cpudist::wire {

// The columns of a file of rows, in the order of Load::offsets.
enum class LoadColumn : size_t {
  kKeys = 0,
  kWeight = 1,
  kState = 2,
  kCount = 3,
  kLastSeen = 4,
  kAverage = 5,
};
inline constexpr size_t kLoadColumns = 6;

enum class LoadKind : uint32_t {
  kRows = 0,     // beside those that are there
  kReplace = 1,  // all rows of the table are dropped first
  kVersion = 2,  // no rows: how many updates the set has had
};

struct Load {  // kLoad; of kVersion only the version counts
  uint32_t table = 0;
  LoadKind kind = LoadKind::kRows;
  Version version;          // of rows: where their snapshot was, by which they count updates
  uint64_t seed = 0;        // kReplace: of what rows of a remote table begin with
  uint64_t table_step = 0;  // updates of the table as a whole
  std::string snapshot;     // name of its directory
  std::string file;
  uint64_t file_bytes = 0;
  uint64_t row_begin = 0;  // of the file's rows; none: nothing is read
  uint64_t row_end = 0;    // exclusive
  // Where row 0 of each column lies in the file; 0: the file has none of it.
  std::array<uint64_t, kLoadColumns> offsets{};
  std::vector<uint32_t> checksums;  // CRC-32C of every kChecksumBytes of the file
};

Buffer encode(const Load& message);
// Checks names, sizes and the table against `layout`; throws Error(kProtocol).
Load decode_load(std::span<const uint8_t> payload, const ParamSetLayout& layout);

}  // namespace cpudist::wire
