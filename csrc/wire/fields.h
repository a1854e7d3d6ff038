// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One description of a message serves both ways: `fields(visitor, message)` names what it consists
// of in the order of the wire; Put writes it, Take reads it and refuses what cannot be. For the
// files that encode and decode.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "wire/checks.h"
#include "wire/primitives.h"

namespace cpudist::wire {

// The second parameter of every fields(): what is written stays as it is.
template <typename Visitor, typename Message>
using Of = std::conditional_t<Visitor::kWrites, const Message, Message>;

// To a Writer or a BulkWriter.
template <typename Out>
class Put {
 public:
  static constexpr bool kWrites = true;
  explicit Put(Out* out) : out_(*out) {}

  template <typename T>
  void number(T value) {
    if constexpr (std::is_enum_v<T>) {
      out_.u32(static_cast<uint32_t>(value));
    } else if constexpr (std::is_same_v<T, double>) {
      out_.f64(value);
    } else if constexpr (std::is_same_v<T, uint64_t>) {
      out_.u64(value);
    } else {
      static_assert(std::is_same_v<T, uint32_t>);
      out_.u32(value);
    }
  }
  void zero() { out_.u32(0); }
  void flag32(bool value, const char*) { out_.u32(value ? 1 : 0); }
  void flag64(bool value, const char*) { out_.u64(value ? 1 : 0); }
  void not_negative(const std::vector<double>& values, const char*) {
    for (const double value : values) out_.f64(value);
  }
  template <typename Enum>
  void choice(Enum value, Enum, Enum, const char*) {
    number(value);
  }
  void text(const std::string& value, size_t) { out_.text(value); }
  template <typename List>
  uint32_t count32(const List& list) {
    out_.u32(static_cast<uint32_t>(list.size()));
    return static_cast<uint32_t>(list.size());
  }
  template <typename List>
  uint64_t count64(const List& list) {
    out_.u64(list.size());
    return list.size();
  }
  template <size_t kSize>
  void octets(const std::array<uint8_t, kSize>& value) {
    static_assert(kSize % 8 == 0);
    out_.bytes(value.data(), kSize);
  }
  template <typename List>
  void elements(const List& list, uint64_t) {
    out_.bytes(list.data(), list.size() * sizeof(*list.data()));
  }
  template <typename Item>
  void items(const std::vector<Item>& list, uint64_t, size_t, const char*) {
    for (const Item& item : list) fields(*this, item);
  }

 private:
  Out& out_;
};

class Take {
 public:
  static constexpr bool kWrites = false;
  explicit Take(Reader* reader) : reader_(*reader) {}

  template <typename T>
  void number(T& value) {
    if constexpr (std::is_enum_v<T>) {
      value = static_cast<T>(reader_.u32());
    } else if constexpr (std::is_same_v<T, double>) {
      value = reader_.f64();
    } else if constexpr (std::is_same_v<T, uint64_t>) {
      value = reader_.u64();
    } else {
      static_assert(std::is_same_v<T, uint32_t>);
      value = reader_.u32();
    }
  }
  void zero() { skip_zero(&reader_); }
  void flag32(bool& value, const char* what) { value = flag(reader_.u32(), what); }
  void flag64(bool& value, const char* what) { value = flag(reader_.u64(), what); }
  // Infinite or NaN gradients are the trainers' business; a negative norm is nobody's.
  // As many as there are in what is read into.
  void not_negative(std::vector<double>& values, const char* what) {
    for (double& value : values) {
      value = reader_.f64();
      if (value < 0) refuse(std::string(what) + " is negative");
    }
  }
  template <typename Enum>
  void choice(Enum& value, Enum first, Enum last, const char* what) {
    const uint32_t found = reader_.u32();
    if (found < static_cast<uint32_t>(first) || found > static_cast<uint32_t>(last)) {
      refuse("unknown " + std::string(what) + " " + std::to_string(found));
    }
    value = static_cast<Enum>(found);
  }
  void text(std::string& value, size_t limit_bytes) { value = reader_.text(limit_bytes); }
  template <typename List>
  uint32_t count32(const List&) {
    return reader_.u32();
  }
  template <typename List>
  uint64_t count64(const List&) {
    return reader_.u64();
  }
  template <size_t kSize>
  void octets(std::array<uint8_t, kSize>& value) {
    const auto found = reader_.array<uint8_t>(kSize);
    std::copy(found.begin(), found.end(), value.begin());
  }
  template <typename T>
  void elements(std::vector<T>& list, uint64_t count) {
    const auto found = reader_.array<T>(count);
    list.assign(found.begin(), found.end());
  }
  template <typename T>  // in place
  void elements(std::span<const T>& list, uint64_t count) {
    list = reader_.array<T>(count);
  }
  template <typename Item>
  void items(std::vector<Item>& list, uint64_t count, size_t bytes_min, const char* what) {
    check_count(reader_, count, bytes_min, what);
    list.reserve(static_cast<size_t>(count));
    for (uint64_t i = 0; i < count; ++i) fields(*this, list.emplace_back());
  }

 private:
  static bool flag(uint64_t value, const char* what) {
    if (value > 1) {
      refuse(std::string(what) + ": expected 0 or 1, found " + std::to_string(value));
    }
    return value == 1;
  }

  Reader& reader_;
};

template <typename Message>
Buffer write_message(const Message& message) {
  Writer writer;
  Put<Writer> put(&writer);
  fields(put, message);
  return writer.finish();
}

// Nothing may follow. `message`: what it is read into.
template <typename Message>
Message read_message(std::span<const uint8_t> payload, Message message = {}) {
  Reader reader(payload);
  Take take(&reader);
  fields(take, message);
  reader.expect_end();
  return message;
}

}  // namespace cpudist::wire
