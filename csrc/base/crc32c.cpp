// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78). The crc32 instruction has a latency of
// three cycles and a throughput of one, so three runs are hashed at a time and then joined: the CRC
// of a run followed by n zero bytes is a linear map of 32 bits, tabulated at compile time.

#include <array>
#include <cstring>

#include "base/crc32c.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace cpudist {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;
constexpr size_t kLongRun = 4096;
constexpr size_t kShortRun = 256;

using SliceTables = std::array<std::array<uint32_t, 256>, 8>;
using ZeroTables = std::array<std::array<uint32_t, 256>, 4>;
using Matrix = std::array<uint32_t, 32>;

constexpr SliceTables make_slice_tables() {
  SliceTables tables{};
  for (uint32_t n = 0; n < 256; ++n) {
    uint32_t crc = n;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kPolynomial : 0u);
    tables[0][n] = crc;
  }
  for (size_t slice = 1; slice < 8; ++slice) {
    for (uint32_t n = 0; n < 256; ++n) {
      const uint32_t crc = tables[slice - 1][n];
      tables[slice][n] = (crc >> 8) ^ tables[0][crc & 0xffu];
    }
  }
  return tables;
}

constexpr uint32_t multiply(const Matrix& matrix, uint32_t vector) {
  uint32_t sum = 0;
  for (size_t i = 0; vector != 0; ++i, vector >>= 1) {
    if ((vector & 1u) != 0) sum ^= matrix[i];
  }
  return sum;
}

// The map "append `size_bytes` zero bytes", a power of two.
constexpr ZeroTables make_zero_tables(size_t size_bytes) {
  Matrix map{};  // one zero bit
  map[0] = kPolynomial;
  for (size_t i = 1; i < 32; ++i) map[i] = 1u << (i - 1);
  for (size_t bits = 1; bits < size_bytes * 8; bits *= 2) {
    Matrix squared{};
    for (size_t i = 0; i < 32; ++i) squared[i] = multiply(map, map[i]);
    map = squared;
  }
  ZeroTables tables{};
  for (uint32_t n = 0; n < 256; ++n) {
    for (size_t byte = 0; byte < 4; ++byte) tables[byte][n] = multiply(map, n << (8 * byte));
  }
  return tables;
}

constexpr SliceTables kSlices = make_slice_tables();
constexpr ZeroTables kLongZeros = make_zero_tables(kLongRun);
constexpr ZeroTables kShortZeros = make_zero_tables(kShortRun);

uint64_t load64(const uint8_t* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

#if defined(__x86_64__)

uint32_t append_zeros(const ZeroTables& zeros, uint32_t crc) {
  return zeros[0][crc & 0xffu] ^ zeros[1][(crc >> 8) & 0xffu] ^ zeros[2][(crc >> 16) & 0xffu] ^
         zeros[3][crc >> 24];
}

// Consumes blocks of three runs while there are any.
__attribute__((target("sse4.2"))) void three_lanes(uint64_t* crc, const uint8_t** next,
                                                   size_t* size, size_t run,
                                                   const ZeroTables& zeros) {
  while (*size >= 3 * run) {
    uint64_t first = *crc;
    uint64_t second = 0;
    uint64_t third = 0;
    const uint8_t* at = *next;
    for (size_t i = 0; i < run; i += 8) {
      first = _mm_crc32_u64(first, load64(at + i));
      second = _mm_crc32_u64(second, load64(at + run + i));
      third = _mm_crc32_u64(third, load64(at + 2 * run + i));
    }
    const uint32_t joined =
        append_zeros(zeros, static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
    *crc = append_zeros(zeros, joined) ^ third;
    *next += 3 * run;
    *size -= 3 * run;
  }
}

__attribute__((target("sse4.2"))) uint32_t hardware(const uint8_t* next, size_t size,
                                                    uint32_t seed) {
  uint64_t crc = ~seed;
  three_lanes(&crc, &next, &size, kLongRun, kLongZeros);
  three_lanes(&crc, &next, &size, kShortRun, kShortZeros);
  for (; size >= 8; next += 8, size -= 8) crc = _mm_crc32_u64(crc, load64(next));
  for (; size > 0; ++next, --size) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), *next);
  return ~static_cast<uint32_t>(crc);
}

#endif

}  // namespace

uint32_t crc32c_table(const void* data, size_t size_bytes, uint32_t seed) {
  const auto* next = static_cast<const uint8_t*>(data);
  uint32_t crc = ~seed;
  for (; size_bytes >= 8; next += 8, size_bytes -= 8) {
    const uint64_t word = load64(next) ^ crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) crc ^= kSlices[7 - i][(word >> (8 * i)) & 0xffu];
  }
  for (; size_bytes > 0; ++next, --size_bytes) {
    crc = (crc >> 8) ^ kSlices[0][(crc ^ *next) & 0xffu];
  }
  return ~crc;
}

bool crc32c_has_hardware() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") != 0;
#else
  return false;
#endif
}

uint32_t crc32c(const void* data, size_t size_bytes, uint32_t seed) {
#if defined(__x86_64__)
  static const bool has_hardware = crc32c_has_hardware();
  if (has_hardware) return hardware(static_cast<const uint8_t*>(data), size_bytes, seed);
#endif
  return crc32c_table(data, size_bytes, seed);
}

}  // namespace cpudist
