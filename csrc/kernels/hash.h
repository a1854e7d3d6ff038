// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Where a row lives: keys are spread over a fixed number of buckets, and buckets are dealt to
// servers, so that a later change of the number of servers moves few rows.

#pragma once

#include <cstddef>
#include <cstdint>

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

// Different for every table, so that the same key of two tables need not share a server.
constexpr uint64_t table_salt(uint32_t param_set, uint32_t table_id) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
  return mix64(((static_cast<uint64_t>(param_set) << 32) | table_id) + kGolden);
}

constexpr uint32_t bucket_of(int64_t key, uint64_t salt) {
  return static_cast<uint32_t>(mix64(static_cast<uint64_t>(key) ^ salt) % kBucketCount);
}

}  // namespace cpudist::kernels
