// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How a message is cut, and the loops that all collectives have in common.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "backends/shm/channel.h"
#include "backends/shm/reduce/reduce.h"
#include "backends/shm/types.h"

namespace cpudist::shm {

// A message that does not fit is cut into pieces that stay in a core's cache.
constexpr size_t kPieceBytes = size_t{512} << 10;
// Up to here elements are always copied: less work than a second wait for all ranks.
constexpr size_t kCopiedBytes = size_t{16} << 10;
// From so many ranks on each sums a share of a large piece, and copies the others'.
constexpr int kSharingRanks = 4;
constexpr size_t kSharedBytes = size_t{64} << 10;

inline const std::byte* at(const void* begin, size_t offset) {
  return static_cast<const std::byte*>(begin) + offset;
}
inline std::byte* at(void* begin, size_t offset) { return static_cast<std::byte*>(begin) + offset; }

inline void copy_bytes(void* to, const void* from, size_t size_bytes) {
  if (size_bytes != 0 && to != from) std::memcpy(to, from, size_bytes);
}

// Bytes of each piece of a message, given how many of its pieces a buffer must hold at once.
inline size_t piece_bytes(const Channel& channel, size_t size_bytes, size_t at_once = 1) {
  const size_t room = channel.slot_bytes() / at_once / kLine * kLine;
  if (size_bytes <= room) return std::max<size_t>(size_bytes, 1);
  return std::min(room, kPieceBytes);
}

// The part of `count` elements that a rank owns; whole lines but for the last one.
struct Part {
  size_t begin, size;
};
inline Part part_of(size_t count, size_t element_bytes, int rank, int size) {
  const size_t line = kLine / element_bytes;
  const size_t lines = (count + line - 1) / line;
  const auto bound = [&](int r) {
    return std::min(count, lines * static_cast<size_t>(r) / static_cast<size_t>(size) * line);
  };
  return {bound(rank), bound(rank + 1) - bound(rank)};
}

inline Header header_of(const Call& call) {
  Header header;
  header.kind = call.kind;
  header.dtype = call.dtype;
  header.reduction = call.reduction;
  header.average = call.average ? 1 : 0;
  header.root = call.root;
  header.count = call.count;
  return header;
}

inline int divisor_of(const Channel& channel, const Call& call) {
  return call.average ? channel.size() : 1;
}

}  // namespace cpudist::shm
