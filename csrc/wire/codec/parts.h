// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What coded payloads are made of. For the files behind codec.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "wire/bulk.h"
#include "wire/codec/codec.h"

namespace cpudist::wire {

inline constexpr uint64_t kCodingBytes = 8;

void write_coding(const Coding& coding, BulkWriter* writer);
Coding take_coding(Reader* reader);

bool increase(std::span<const int64_t> keys);  // strictly
// Positions of the keys in increasing order.
std::vector<uint32_t> order_of(std::span<const int64_t> keys);

// Bytes of the values and keys of a plain payload.
uint64_t plain_values_bytes(std::span<const DenseSection> blocks,
                            std::span<const TableSection> tables);

// Codes of the keys of several sections.
class KeyCodes {
 public:
  void add(std::span<const int64_t> keys, const TableSpec& table);  // increasing
  void add_unordered(std::span<const int64_t> keys, const TableSpec& table);
  uint64_t size_bytes() const { return size_bytes_; }  // of all, padded
  void write(size_t section, BulkWriter* writer) const;

 private:
  std::vector<uint8_t> bytes_;
  std::vector<size_t> ends_;
  uint64_t size_bytes_ = 0;
};

// Keys of one section and the padding behind them.
void read_keys(Reader* reader, const TableSpec& table, std::span<int64_t> keys);

// Adds up what a plain payload takes, and what the least is that its code takes.
class PlainSize {
 public:
  explicit PlainSize(uint64_t remaining) : remaining_(remaining) {}
  void add(uint64_t plain_bytes, uint64_t coded_bytes);
  void add_keys(uint64_t count, const TableSpec& table);
  uint64_t checked() const;  // refuses what the remaining bytes cannot hold

 private:
  uint64_t remaining_;
  uint64_t plain_bytes_ = 0;
  uint64_t coded_bytes_ = 0;
};

// Fills memory of known size from its beginning to its end.
class PlainWriter {
 public:
  // Throws Error(kOverloaded) if there is no memory.
  PlainWriter(const Allocate& allocate, uint64_t size_bytes);
  void bytes(std::span<const uint8_t> data);
  template <typename T>
  T* section(uint64_t count) {
    return reinterpret_cast<T*>(take(count * sizeof(T)));
  }
  Buffer finish();

 private:
  uint8_t* take(uint64_t size_bytes);  // and zeros up to a multiple of 8

  Buffer payload_;
  uint64_t at_ = 0;
};

}  // namespace cpudist::wire
