// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "wire/codec/parts.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "wire/codec/keys.h"

namespace cpudist::wire {
namespace {

constexpr size_t kRadixBits = 11;
constexpr size_t kRadixSize = size_t{1} << kRadixBits;
constexpr size_t kRadixKeysMin = 256;

struct PlacedKey {
  uint64_t key;
  uint32_t place;
};

WireDType dtype_from(uint8_t value, const char* what) {
  if (value < kWireDTypeCount) return static_cast<WireDType>(value);
  refuse(std::string("unknown dtype ") + std::to_string(value) + " of " + what);
}

}  // namespace

void write_coding(const Coding& coding, BulkWriter* writer) {
  uint8_t bytes[kCodingBytes] = {};
  bytes[0] = static_cast<uint8_t>(coding.values);
  bytes[1] = static_cast<uint8_t>(coding.reply);
  writer->bytes(bytes, sizeof(bytes));
}

Coding take_coding(Reader* reader) {
  const auto bytes = reader->array<uint8_t>(kCodingBytes);
  Coding coding;
  coding.values = dtype_from(bytes[0], "values");
  coding.reply = dtype_from(bytes[1], "a reply");
  if (coding.reply == WireDType::kInt8) refuse("weights do not travel as int8");
  for (const uint8_t zero : bytes.subspan(2)) {
    if (zero != 0) refuse("reserved bytes of a coded payload are not zero");
  }
  return coding;
}

void sort_keys(std::span<int64_t> keys) {
  if (increase(keys)) return;
  const std::vector<int64_t> given(keys.begin(), keys.end());
  size_t i = 0;
  for (const uint32_t at : order_of(given)) keys[i++] = given[at];
}

bool increase(std::span<const int64_t> keys) {
  bool ordered = true;
  for (size_t i = 1; i < keys.size(); ++i) ordered &= keys[i - 1] < keys[i];
  return ordered;
}

std::vector<uint32_t> order_of(std::span<const int64_t> keys) {
  std::vector<uint32_t> order(keys.size());
  if (keys.size() < kRadixKeysMin) {
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return keys[a] < keys[b]; });
    return order;
  }
  // Least digits first, of how far keys are above the lowest.
  const auto [low, high] = std::minmax_element(keys.begin(), keys.end());
  const auto lowest = static_cast<uint64_t>(*low);
  const uint64_t largest = static_cast<uint64_t>(*high) - lowest;
  std::vector<PlacedKey> entries(keys.size());
  std::vector<PlacedKey> other(keys.size());
  for (uint32_t i = 0; i < keys.size(); ++i)
    entries[i] = {static_cast<uint64_t>(keys[i]) - lowest, i};
  uint32_t starts[kRadixSize];
  for (size_t shift = 0; shift < 64 && largest >> shift != 0; shift += kRadixBits) {
    const auto digit = [&](const PlacedKey& entry) { return (entry.key >> shift) % kRadixSize; };
    std::fill_n(starts, kRadixSize, 0);
    for (const PlacedKey& entry : entries) ++starts[digit(entry)];
    std::exclusive_scan(starts, starts + kRadixSize, starts, 0u);
    for (const PlacedKey& entry : entries) other[starts[digit(entry)]++] = entry;
    entries.swap(other);
  }
  for (size_t i = 0; i < entries.size(); ++i) order[i] = entries[i].place;
  return order;
}

uint64_t plain_values_bytes(std::span<const DenseSection> blocks,
                            std::span<const TableSection> tables) {
  uint64_t size = 0;
  for (const DenseSection& section : blocks) size += padded(section.values.size());
  for (const TableSection& section : tables) {
    size += padded(section.keys.size_bytes()) + padded(section.rows.size_bytes());
  }
  return size;
}

void KeyCodes::add(std::span<const int64_t> keys, const TableSpec& table) {
  const size_t begin = bytes_.size();
  encode_keys(keys, table.open, &bytes_);
  ends_.push_back(bytes_.size());
  size_bytes_ += padded(bytes_.size() - begin);
}

void KeyCodes::add_unordered(std::span<const int64_t> keys, const TableSpec& table) {
  if (increase(keys)) return add(keys, table);
  std::vector<int64_t> ordered(keys.begin(), keys.end());
  sort_keys(ordered);
  add(ordered, table);
}

void KeyCodes::write(size_t section, BulkWriter* writer) const {
  const size_t begin = section == 0 ? 0 : ends_[section - 1];
  writer->bytes(bytes_.data() + begin, ends_[section] - begin);
}

void read_keys(Reader* reader, const TableSpec& table, std::span<int64_t> keys) {
  // The padding is checked with them.
  reader->array<uint8_t>(decode_keys(reader->rest(), {table.rows, table.open}, keys));
}

void PlainSize::add(uint64_t plain_bytes, uint64_t coded_bytes) {
  plain_bytes_ = checked_add(plain_bytes_, plain_bytes);
  coded_bytes_ = checked_add(coded_bytes_, coded_bytes);
}

void PlainSize::add_keys(uint64_t count, const TableSpec& table) {
  if (!table.open && count > table.rows) {
    refuse(std::to_string(count) + " keys of table '" + table.name.substr(0, 200) +
           "', which has " + std::to_string(table.rows) + " rows");
  }
  add(section_bytes(count, sizeof(int64_t)), coded_keys_bytes_min(count));
}

uint64_t PlainSize::checked() const {
  if (coded_bytes_ > remaining_) {
    refuse("a coded payload announces at least " + std::to_string(coded_bytes_) +
           " bytes but holds only " + std::to_string(remaining_) + " more");
  }
  if (plain_bytes_ > kPayloadLimitBytes) {
    refuse("a coded payload stands for " + std::to_string(plain_bytes_) + " bytes, at most " +
           std::to_string(kPayloadLimitBytes));
  }
  return plain_bytes_;
}

PlainWriter::PlainWriter(const Allocate& allocate, uint64_t size_bytes)
    : payload_(allocate(size_bytes)) {
  if (payload_.size() == size_bytes) return;
  throw Error(ErrorCode::kOverloaded,
              "no memory for a payload of " + std::to_string(size_bytes) + " bytes");
}

void PlainWriter::bytes(std::span<const uint8_t> data) {
  uint8_t* to = take(data.size());
  if (!data.empty()) std::memcpy(to, data.data(), data.size());
}

uint8_t* PlainWriter::take(uint64_t size_bytes) {
  const uint64_t end = padded(size_bytes);
  if (end > payload_.size() - at_) {
    throw Error(ErrorCode::kInternal, "a decoded payload is longer than it was counted");
  }
  uint8_t* start = payload_.data() + at_;
  if (end > size_bytes) std::memset(start + size_bytes, 0, end - size_bytes);
  at_ += end;
  return start;
}

Buffer PlainWriter::finish() {
  if (at_ != payload_.size()) {
    throw Error(ErrorCode::kInternal, "a decoded payload is shorter than it was counted");
  }
  return std::move(payload_);
}

}  // namespace cpudist::wire
