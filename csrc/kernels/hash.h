// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Where a row lives: keys are spread over a fixed number of buckets, and buckets are dealt to
// servers, so that a later change of the number of servers moves few rows.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cpudist::kernels {

constexpr size_t kBucketCount = 4096;

// The 64-bit finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection in which each
// input bit flips about half of the output bits.
constexpr uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  x ^= x >> 31;
  return x;
}

// Another for each name of a table, so that the same key of two tables need not share a server,
// and the same in every run, so that rows lie where they lay before. FNV-1a (Fowler, Noll, Vo),
// of which the last bytes move the high bits little: hence mix64.
constexpr uint64_t table_salt(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char letter : name) {
    hash ^= static_cast<uint8_t>(letter);
    hash *= 0x100000001b3ULL;
  }
  return mix64(hash);
}

constexpr uint64_t hash_of(int64_t key, uint64_t salt) {
  return mix64(static_cast<uint64_t>(key) ^ salt);
}

constexpr uint32_t bucket_of(int64_t key, uint64_t salt) {
  return static_cast<uint32_t>(hash_of(key, salt) % kBucketCount);
}

}  // namespace cpudist::kernels
