// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the files that encode and decode share: limits, overflow-safe sizes, refusals.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "base/errors.h"
#include "kernels/optimizers.h"
#include "wire/primitives.h"

namespace cpudist::wire {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian in place");

inline constexpr size_t kArrayAlignment = 8;
inline constexpr size_t kNameBytesMax = 4096;
inline constexpr size_t kHostBytesMax = 1024;
// Together with its header an error fits into a frame before the handshake.
inline constexpr size_t kErrorBytesMax = 3072;
inline constexpr uint32_t kDimMax = 65536;
inline constexpr size_t kTrainersMax = 65535;
inline constexpr uint64_t kRowsLimit = 1ull << 62;
inline constexpr uint64_t kElementsLimit = 1ull << 40;

[[noreturn]] inline void refuse(const std::string& what) {
  throw Error(ErrorCode::kProtocol, what);
}

inline uint64_t checked_add(uint64_t a, uint64_t b) {
  uint64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) refuse("a size in a frame overflows 64 bits");
  return sum;
}

inline uint64_t checked_multiply(uint64_t a, uint64_t b) {
  uint64_t product;
  if (__builtin_mul_overflow(a, b, &product)) refuse("a size in a frame overflows 64 bits");
  return product;
}

inline uint64_t padded(uint64_t size_bytes) {
  return checked_add(size_bytes, kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment;
}

// Before reserving for `count` things of which each takes at least `bytes_min` of the payload.
inline void check_count(const Reader& reader, uint64_t count, size_t bytes_min, const char* what) {
  if (count > reader.remaining() / bytes_min) {
    refuse("a frame announces " + std::to_string(count) + " " + what + " but holds only " +
           std::to_string(reader.remaining()) + " more bytes");
  }
}

// A u32 that only pairs up another one.
inline void skip_zero(Reader* reader) {
  const uint32_t value = reader->u32();
  if (value != 0) refuse("reserved bytes of a frame are not zero");
}

// A configuration that came in a frame; throws Error(kProtocol) with the option at fault.
void check_config(const kernels::OptimizerConfig& config);

}  // namespace cpudist::wire
