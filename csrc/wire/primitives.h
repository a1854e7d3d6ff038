// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What payloads are made of: readers and writers of single values, little-endian.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/buffer.h"

namespace cpudist::wire {

// Appends to a growing buffer (small messages). text() and bytes() take a multiple of 8 bytes, so
// everything stays aligned as long as u32 come in pairs.
class Writer {
 public:
  void u32(uint32_t value);
  void u64(uint64_t value);
  void f64(double value);
  void text(std::string_view value);                // u32 length + bytes + padding to 8
  void bytes(const void* data, size_t size_bytes);  // + padding to 8
  Buffer finish();

 private:
  std::vector<uint8_t> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const uint8_t> payload) : rest_(payload) {}
  uint32_t u32();
  uint64_t u64();
  double f64();
  std::string text(size_t limit_bytes);
  // `count` elements in place; skips the padding to 8, which must be zero.
  template <typename T>
  std::span<const T> array(uint64_t count);
  size_t remaining() const { return rest_.size(); }
  std::span<const uint8_t> rest() const { return rest_; }
  void expect_end() const;  // trailing bytes are a protocol error

 private:
  std::span<const uint8_t> take(uint64_t size_bytes);
  // `count` elements of `element_bytes` and their padding; checks bounds and alignment.
  const uint8_t* take_array(uint64_t count, size_t element_bytes, size_t alignment);
  std::span<const uint8_t> rest_;
};

template <typename T>
std::span<const T> Reader::array(uint64_t count) {
  const uint8_t* start = take_array(count, sizeof(T), alignof(T));
  return {reinterpret_cast<const T*>(start), static_cast<size_t>(count)};
}

}  // namespace cpudist::wire
