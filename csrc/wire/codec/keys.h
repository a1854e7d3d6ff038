// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Increasing keys as the gaps between them, Rice-coded with a parameter per 128 keys: about
// log2(N/U) + 1.5 bits a key for U of N rows at random, 1 bit a key for a dense run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cpudist::wire {

// Bits, least significant first, of a payload.
class BitWriter {
 public:
  explicit BitWriter(std::vector<uint8_t>* bytes) : bytes_(bytes) {}
  void put(uint64_t value, uint32_t count);  // value < 2^count
  void put_zeros(uint64_t count);
  void finish();  // zeros up to a whole byte

 private:
  std::vector<uint8_t>* bytes_;
  uint64_t word_ = 0;
  uint32_t used_ = 0;  // below 32 between calls
};

// Throws Error(kProtocol) past the end.
class BitReader {
 public:
  explicit BitReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  uint64_t take(uint32_t count);  // count <= 63
  // Zeros up to the next one, which is taken as well.
  uint64_t take_zeros();
  // The bytes begun; throws if the rest of the last one is not zero.
  size_t finish();

 private:
  void refill();

  std::span<const uint8_t> bytes_;
  size_t next_ = 0;  // byte
  uint64_t word_ = 0;
  uint32_t available_ = 0;  // bits in word_
};

// Which keys a table can have: 0 to rows - 1, rows being at most 2^62; of an open one all.
struct KeyRange {
  uint64_t rows = 0;
  bool open = false;
};

// Appends the code of strictly increasing keys of a table. Those of an open one are coded as their
// distance from the lowest int64.
void encode_keys(std::span<const int64_t> keys, bool open, std::vector<uint8_t>* out);
// Fills `keys`, which increase strictly and are of the range; returns the bytes read. Throws
// Error(kProtocol).
size_t decode_keys(std::span<const uint8_t> bytes, const KeyRange& range, std::span<int64_t> keys);

// No code of `count` keys is shorter.
inline uint64_t coded_keys_bytes_min(uint64_t count) { return (count + 7) / 8; }

}  // namespace cpudist::wire
