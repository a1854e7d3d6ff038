// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/parse/numbers.h"

#include <charconv>
#include <cmath>
#include <string_view>

namespace cpudist::data {
namespace {

constexpr int64_t kExponentLimit = 1'000'000'000;

bool begins_with(std::string_view text, std::string_view word) {
  if (text.size() < word.size()) return false;
  for (size_t i = 0; i < word.size(); ++i) {
    if ((text[i] | 0x20) != word[i]) return false;
  }
  return true;
}

// Whether a number that a float cannot hold is too large, not too small: by the power of ten
// of its first digit that is not 0.
bool is_large(std::string_view text) {
  int64_t power = 0;
  bool point = false;
  bool counting = false;
  size_t i = 0;
  for (; i < text.size() && (is_digit(text[i]) || text[i] == '.'); ++i) {
    if (text[i] == '.') {
      point = true;
      continue;
    }
    counting |= text[i] != '0';
    if (!point && counting) ++power;
    if (point && !counting) --power;
  }
  if (i == text.size()) return power > 0;
  const bool negative = text[++i] == '-';
  if (text[i] == '-' || text[i] == '+') ++i;
  int64_t exponent = 0;
  for (; i < text.size() && exponent < kExponentLimit; ++i)
    exponent = exponent * 10 + text[i] - '0';
  return power + (negative ? -exponent : exponent) > 0;
}

}  // namespace

bool scale_by_double(uint64_t digits, int64_t exponent, float& value) {
  static constexpr double kPowers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                       1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                       1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
  if (digits > 1ULL << 53 || exponent > 22 || exponent < -22) return false;
  const auto whole = static_cast<double>(static_cast<int64_t>(digits));
  const double scaled = exponent < 0 ? whole / kPowers[-exponent] : whole * kPowers[exponent];
  // Normal floats keep 24 of 53 bits. Where the other 29 say "half", the digits behind the double
  // would have to decide.
  constexpr uint64_t kDropped = (1ULL << 29) - 1;
  constexpr uint64_t kHalf = 1ULL << 28;
  if ((std::bit_cast<uint64_t>(scaled) & kDropped) == kHalf) return false;
  if (scaled != 0.0 && (scaled < 1e-37 || scaled > 3e38)) return false;
  value = static_cast<float>(scaled);
  return true;
}

Fault read_float_slowly(const char*& at, const char* end, float& value) {
  const char* begin = at;
  const bool negative = take_sign(begin, end);
  const std::string_view text(begin, static_cast<size_t>(end - begin));
  if (begins_with(text, "nan") || begins_with(text, "inf")) return Fault::kNotFinite;
  if (text.empty() || (!is_digit(text[0]) && text[0] != '.')) return Fault::kNotANumber;
  float found = 0.0f;
  const auto [rest, failure] = std::from_chars(begin, end, found);
  if (failure == std::errc::invalid_argument) return Fault::kNotANumber;
  if (failure == std::errc::result_out_of_range || !std::isfinite(found)) {
    if (is_large({begin, static_cast<size_t>(rest - begin)})) return Fault::kTooLarge;
    found = 0.0f;
  }
  value = negative ? -found : found;
  at = rest;
  return Fault::kNone;
}

}  // namespace cpudist::data
