// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Numbers from text, eight bytes at a time. Every reader takes a text that 16 bytes may be read
// behind, whatever they are, and on success leaves `at` behind the number: whether a
// delimiter follows is the caller's to check.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "data/parse/hashing.h"

namespace cpudist::data {

enum class Fault : uint8_t {
  kNone,
  kNotANumber,
  kTooLarge,   // does not fit the type
  kNotFinite,  // NaN or infinity
};

inline constexpr uint64_t kEachByte = 0x0101010101010101ULL;
inline constexpr uint64_t kPowersOfTen[] = {1,       10,        100,        1000,       10'000,
                                            100'000, 1'000'000, 10'000'000, 100'000'000};

// Which of the word's bytes, from the first on, are decimal digits, 0 to 8 of them.
inline size_t leading_digits(uint64_t word) {
  const uint64_t digits = word ^ (kEachByte * '0');
  // A carry only reaches bytes behind the first that is no digit.
  const uint64_t others = ((digits + kEachByte * 0x76) | digits) & (kEachByte * 0x80);
  return others == 0 ? 8 : static_cast<size_t>(std::countr_zero(others)) / 8;
}

// The value of the first `count` digits, 1 to 8: pairs, then fours, then all, by multiplications.
inline uint64_t digits_value(uint64_t word, size_t count) {
  uint64_t value = (word ^ (kEachByte * '0')) << (8 * (8 - count));
  value = value * 10 + (value >> 8);
  constexpr uint64_t kPairs = 0x000000ff000000ffULL;
  return ((value & kPairs) * (100 + (1'000'000ULL << 32)) +
          ((value >> 16) & kPairs) * (1 + (10'000ULL << 32))) >>
         32;
}

// Up to 8 digits before `end`: their number, and their value added to `value` times its power.
inline size_t take_digits(const char* at, const char* end, uint64_t& value) {
  const uint64_t word = load8(at);
  const size_t count = std::min(leading_digits(word), static_cast<size_t>(end - at));
  if (count > 0) value = value * kPowersOfTen[count] + digits_value(word, count);
  return count;
}

inline bool is_digit(char byte) { return static_cast<unsigned char>(byte - '0') < 10; }

inline bool take_sign(const char*& at, const char* end) {
  if (at == end || (*at != '-' && *at != '+')) return false;
  return *at++ == '-';
}

// A signed integer of 64 bits in decimal.
inline Fault read_int(const char*& at, const char* end, int64_t& value) {
  const char* digit = at;
  const bool negative = take_sign(digit, end);
  uint64_t size = 0;
  size_t count = take_digits(digit, end, size);
  if (count == 0) return Fault::kNotANumber;
  digit += count;
  if (count == 8) [[unlikely]] {
    count = take_digits(digit, end, size);
    digit += count;
    for (; count == 8 && digit < end && is_digit(*digit); ++digit) {
      if (__builtin_mul_overflow(size, uint64_t{10}, &size) ||
          __builtin_add_overflow(size, static_cast<uint64_t>(*digit - '0'), &size)) {
        return Fault::kTooLarge;
      }
    }
  }
  if (size > (~0ULL >> 1) + (negative ? 1 : 0)) return Fault::kTooLarge;
  value = static_cast<int64_t>(negative ? ~size + 1 : size);
  at = digit;
  return Fault::kNone;
}

// Each byte's value as a hex digit; `count` how many from the first on are digits at all.
inline uint64_t hex_nibbles(uint64_t word, size_t& count) {
  const uint64_t letters = word & (kEachByte * 0x40);
  const uint64_t lower = word | (letters >> 1);
  const uint64_t nibbles = (word & (kEachByte * 0x0f)) + (letters >> 6) * 9;
  // Written as digits again, a digit is what it was. No sum carries into the next byte.
  const uint64_t above_nine = ((nibbles + kEachByte * 6) >> 4) & kEachByte;
  const uint64_t written = nibbles + kEachByte * '0' + above_nine * ('a' - '0' - 10);
  const uint64_t others = (written ^ lower) | (nibbles & (kEachByte * 0xf0));
  count = others == 0 ? 8 : static_cast<size_t>(std::countr_zero(others)) / 8;
  return nibbles;
}

inline uint64_t nibbles_value(uint64_t nibbles, size_t count) {
  uint64_t value = nibbles << (8 * (8 - count));
  value = ((value << 4) | (value >> 8)) & 0x00ff00ff00ff00ffULL;
  value = ((value << 8) | (value >> 16)) & 0x0000ffff0000ffffULL;
  return ((value << 16) | (value >> 32)) & 0xffffffffULL;
}

// 1 to 16 hex digits of either case, as 64 bits.
inline Fault read_hex(const char*& at, const char* end, uint64_t& value) {
  size_t count = 0;
  const uint64_t nibbles = hex_nibbles(load8(at), count);
  count = std::min(count, static_cast<size_t>(end - at));
  if (count == 0) return Fault::kNotANumber;
  value = nibbles_value(nibbles, count);
  if (count == 8) {
    const uint64_t more = hex_nibbles(load8(at + 8), count);
    count = std::min(count, static_cast<size_t>(end - at) - 8);
    if (count > 0) value = (value << (4 * count)) | nibbles_value(more, count);
    if (count == 8 && end - at > 16) {
      size_t too_many = 0;
      hex_nibbles(load8(at + 16), too_many);
      if (too_many > 0) return Fault::kTooLarge;
    }
    count += 8;
  }
  at += count;
  return Fault::kNone;
}

// A finite number, rounded to the nearest float: digits with a point or without, an exponent, a
// sign. What is too small becomes 0.
Fault read_float_slowly(const char*& at, const char* end, float& value);

// True if digits * 10^exponent could be rounded to the nearest float by one exact step.
inline bool scale_exactly(uint64_t digits, int64_t exponent, float& value) {
  static constexpr float kPowers[] = {1e0f, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f,
                                      1e6f, 1e7f, 1e8f, 1e9f, 1e10f};
  if (digits > 1u << 24 || exponent > 10 || exponent < -10) return false;
  const auto whole = static_cast<float>(static_cast<int64_t>(digits));
  value = exponent < 0 ? whole / kPowers[-exponent] : whole * kPowers[exponent];
  return true;
}

// The same over a double, whose 53 bits decide the rounding to 24 unless they lie between two.
bool scale_by_double(uint64_t digits, int64_t exponent, float& value);

inline Fault read_float(const char*& at, const char* end, float& value) {
  const char* next = at;
  const bool negative = take_sign(next, end);
  uint64_t digits = 0;
  const size_t whole = take_digits(next, end, digits);
  next += whole;
  size_t fraction = 0;
  if (next < end && *next == '.') {
    fraction = take_digits(++next, end, digits);
    next += fraction;
    if (fraction == 8) {
      fraction += take_digits(next, end, digits);
      next = next - 8 + fraction;
    }
  }
  const bool exponent_follows = next < end && (*next | 0x20) == 'e';
  // 19 digits fit 64 bits, and 8 or 16 in a row may go on.
  const bool simple = whole < 8 && fraction < 16 && whole + fraction < 20 && whole + fraction > 0 &&
                      !exponent_follows;
  const auto exponent = -static_cast<int64_t>(fraction);
  if (!simple ||
      !(scale_exactly(digits, exponent, value) || scale_by_double(digits, exponent, value))) {
    return read_float_slowly(at, end, value);
  }
  if (negative) value = -value;
  at = next;
  return Fault::kNone;
}

}  // namespace cpudist::data
