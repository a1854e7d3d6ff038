// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// From values and texts to ids. The same on every machine and in every version: models are trained
// on these ids.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/hash.h"

namespace cpudist::data {

static_assert(std::endian::native == std::endian::little, "words of text are read little-endian");

inline uint64_t load8(const char* text) {
  uint64_t word;
  std::memcpy(&word, text, sizeof(word));
  return word;
}

constexpr uint64_t slot_salt(uint32_t slot_index) {
  return kernels::mix64(slot_index + 0x9e3779b97f4a7c15ULL);
}

// Spreads a hash over [1, ids + 1) without a division.
inline int64_t bucket_id(uint64_t value, uint64_t salt, uint64_t ids) {
  const auto product = static_cast<unsigned __int128>(kernels::mix64(value ^ salt)) * ids;
  return static_cast<int64_t>(1 + static_cast<uint64_t>(product >> 64));
}

// A 64-bit hash of bytes: h = mix64(size + golden), then h = mix64(h ^ word) for each 8 bytes as a
// little-endian word, the last filled up with 0. Reads up to 7 bytes behind the text.
inline uint64_t hash_bytes(const char* text, size_t size) {
  uint64_t hash = kernels::mix64(size + 0x9e3779b97f4a7c15ULL);
  for (; size >= 8; size -= 8, text += 8) hash = kernels::mix64(hash ^ load8(text));
  if (size == 0) return hash;
  const uint64_t last = load8(text) & ((1ull << (8 * size)) - 1);
  return kernels::mix64(hash ^ last);
}

}  // namespace cpudist::data
