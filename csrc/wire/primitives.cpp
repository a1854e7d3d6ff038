// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Reader and Writer: the primitive fields of every payload.
#include "wire/primitives.h"

#include <algorithm>
#include <cstring>

#include "wire/checks.h"

namespace cpudist::wire {
namespace {

template <typename T>
T load(std::span<const uint8_t> bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

template <typename T>
void append(std::vector<uint8_t>* bytes, T value) {
  const auto* start = reinterpret_cast<const uint8_t*>(&value);
  bytes->insert(bytes->end(), start, start + sizeof(T));
}

}  // namespace

void Writer::u32(uint32_t value) { append(&bytes_, value); }
void Writer::u64(uint64_t value) { append(&bytes_, value); }
void Writer::f64(double value) { append(&bytes_, value); }

void Writer::text(std::string_view value) {
  u32(static_cast<uint32_t>(value.size()));
  bytes_.insert(bytes_.end(), value.begin(), value.end());
  const uint64_t field = sizeof(uint32_t) + value.size();
  bytes_.resize(bytes_.size() + (padded(field) - field));
}

void Writer::bytes(const void* data, size_t size_bytes) {
  const auto* start = static_cast<const uint8_t*>(data);
  if (size_bytes > 0) bytes_.insert(bytes_.end(), start, start + size_bytes);
  bytes_.resize(bytes_.size() + (padded(size_bytes) - size_bytes));
}

Buffer Writer::finish() {
  Buffer buffer(bytes_.size());
  if (!bytes_.empty()) std::memcpy(buffer.data(), bytes_.data(), bytes_.size());
  bytes_.clear();
  return buffer;
}

std::span<const uint8_t> Reader::take(uint64_t size_bytes) {
  if (size_bytes > rest_.size()) {
    refuse("a frame is too short: a field needs " + std::to_string(size_bytes) + " bytes, only " +
           std::to_string(rest_.size()) + " are left");
  }
  const auto taken = rest_.first(static_cast<size_t>(size_bytes));
  rest_ = rest_.subspan(static_cast<size_t>(size_bytes));
  return taken;
}

uint32_t Reader::u32() { return load<uint32_t>(take(sizeof(uint32_t))); }
uint64_t Reader::u64() { return load<uint64_t>(take(sizeof(uint64_t))); }
double Reader::f64() { return load<double>(take(sizeof(double))); }

std::string Reader::text(size_t limit_bytes) {
  const uint32_t size = u32();
  if (size > limit_bytes) {
    refuse("a text of " + std::to_string(size) + " bytes is above its limit of " +
           std::to_string(limit_bytes));
  }
  const uint64_t field = padded(sizeof(uint32_t) + uint64_t{size});
  const auto taken = take(field - sizeof(uint32_t));
  const auto padding = taken.subspan(size);
  if (std::any_of(padding.begin(), padding.end(), [](uint8_t byte) { return byte != 0; })) {
    refuse("padding bytes of a text are not zero");
  }
  return {taken.begin(), taken.begin() + size};
}

const uint8_t* Reader::take_array(uint64_t count, size_t element_bytes, size_t alignment) {
  const uint64_t size_bytes = checked_multiply(count, element_bytes);
  const auto taken = take(padded(size_bytes));
  if (reinterpret_cast<uintptr_t>(taken.data()) % alignment != 0) {
    refuse("an array of a frame is not aligned");
  }
  const auto padding = taken.subspan(static_cast<size_t>(size_bytes));
  if (std::any_of(padding.begin(), padding.end(), [](uint8_t byte) { return byte != 0; })) {
    refuse("padding bytes of an array are not zero");
  }
  return taken.data();
}

void Reader::expect_end() const {
  if (!rest_.empty()) {
    refuse(std::to_string(rest_.size()) + " bytes too many at the end of a frame");
  }
}

}  // namespace cpudist::wire
