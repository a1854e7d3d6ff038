// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Numbers from text, against the C library's.

#include "data/parse/numbers.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>

#include "support/check.h"

using namespace cpudist::data;  // NOLINT

namespace {

// The text with bytes behind it that would go on, in memory of just the size that may be read.
struct Guarded {
  explicit Guarded(const std::string& text)
      : bytes(std::make_unique<char[]>(text.size() + 16)), size(text.size()) {
    text.copy(bytes.get(), size);
    std::fill_n(bytes.get() + size, 16, '9');
  }
  const char* begin() const { return bytes.get(); }
  const char* end() const { return bytes.get() + size; }
  std::unique_ptr<char[]> bytes;
  size_t size;
};

template <typename T>
Fault read_whole(const std::string& text, T& value, Fault (*read)(const char*&, const char*, T&)) {
  const Guarded guarded(text);
  const char* at = guarded.begin();
  const Fault fault = read(at, guarded.end(), value);
  if (fault == Fault::kNone && at != guarded.end()) return Fault::kNotANumber;
  if (fault != Fault::kNone) CHECK(at == guarded.begin());
  return fault;
}

Fault int_of(const std::string& text, int64_t& value) { return read_whole(text, value, &read_int); }

Fault hex_of(const std::string& text, uint64_t& value) {
  return read_whole(text, value, &read_hex);
}

Fault float_of(const std::string& text, float& value) {
  return read_whole(text, value, &read_float);
}

void check_float(const std::string& text) {
  const float expected = std::strtof(text.c_str(), nullptr);
  float found = 0;
  const Fault fault = float_of(text, found);
  if (std::isinf(expected)) {
    if (fault != Fault::kTooLarge) cpudist::testing::fail(__FILE__, __LINE__, text + " was taken");
    return;
  }
  if (fault != Fault::kNone ||
      std::bit_cast<uint32_t>(found) != std::bit_cast<uint32_t>(expected)) {
    cpudist::testing::fail(__FILE__, __LINE__, text + ": found " + std::to_string(found));
  }
}

}  // namespace

TEST(data_ints_of_every_length) {
  std::mt19937_64 generator(3);
  for (int round = 0; round < 20000; ++round) {
    const auto value = static_cast<int64_t>(generator()) >> (generator() % 64);
    int64_t found = 0;
    CHECK(int_of(std::to_string(value), found) == Fault::kNone);
    CHECK_EQ(found, value);
    const std::string zeros(generator() % 30, '0');
    const std::string text = std::to_string(value);
    const bool negative = value < 0;
    CHECK(int_of((negative ? "-" : "+") + zeros + text.substr(negative), found) == Fault::kNone);
    CHECK_EQ(found, value);
  }
}

TEST(data_ints_end_at_64_bits) {
  int64_t found = 0;
  CHECK(int_of("9223372036854775807", found) == Fault::kNone);
  CHECK_EQ(found, std::numeric_limits<int64_t>::max());
  CHECK(int_of("-9223372036854775808", found) == Fault::kNone);
  CHECK_EQ(found, std::numeric_limits<int64_t>::min());
  for (const char* text : {"9223372036854775808", "-9223372036854775809", "18446744073709551616",
                           "99999999999999999999999999", "92233720368547758070"}) {
    CHECK(int_of(text, found) == Fault::kTooLarge);
  }
  for (const char* text : {"", "-", "+", "x", "1x", "--1", "+-1", "1.0", " 1", "1 ", "0x10", "\x80",
                           "12345678x", "1234567890123456x", "/", ":"}) {
    CHECK(int_of(text, found) == Fault::kNotANumber);
  }
}

TEST(data_hex_of_either_case) {
  std::mt19937_64 generator(4);
  char text[32];
  for (int round = 0; round < 20000; ++round) {
    const uint64_t value = generator() >> (generator() % 64);
    const int width = static_cast<int>(generator() % 17);
    uint64_t found = 0;
    const char* format = generator() % 2 == 0 ? "%0*llx" : "%0*llX";
    std::snprintf(text, sizeof(text), format, width, static_cast<unsigned long long>(value));
    CHECK(hex_of(text, found) == Fault::kNone);
    CHECK_EQ(found, value);
  }
  uint64_t found = 0;
  CHECK(hex_of("10000000000000000", found) == Fault::kTooLarge);
  CHECK(hex_of("", found) == Fault::kNotANumber);
  // Every byte but the 22 digits ends the number, wherever it stands.
  for (int byte = 0; byte < 256; ++byte) {
    const bool digit = byte < 128 && std::isxdigit(byte) != 0;
    for (size_t place = 0; place < 12; ++place) {
      std::string changed(12, 'a');
      changed[place] = static_cast<char>(byte);
      CHECK((hex_of(changed, found) == Fault::kNone) == digit);
    }
  }
}

TEST(data_floats_round_as_the_c_library) {
  std::mt19937_64 generator(5);
  char text[400];
  for (int round = 0; round < 60000; ++round) {
    const auto bits = static_cast<uint32_t>(generator());
    const float value = std::bit_cast<float>(bits);
    if (!std::isfinite(value)) continue;
    const int digits = static_cast<int>(generator() % 20);
    std::snprintf(text, sizeof(text), "%.*g", digits, static_cast<double>(value));
    check_float(text);
    std::snprintf(text, sizeof(text), "%.*f", digits, std::ldexp(value, -(round % 100)));
    check_float(text);
    const auto digits_shown = generator() >> (generator() % 64);
    std::snprintf(text, sizeof(text), "%llu.%0*u",
                  static_cast<unsigned long long>(digits_shown % 100000), digits % 9 + 1,
                  static_cast<unsigned>(generator() % 10));
    check_float(text);
  }
}

// Texts on and beside the middle of two floats, where a second rounding would err.
TEST(data_floats_between_two) {
  std::mt19937_64 generator(6);
  char text[200];
  for (int round = 0; round < 20000; ++round) {
    const auto bits = static_cast<uint32_t>(generator()) & 0x7fffffff;
    const float low = std::bit_cast<float>(bits);
    const float high = std::bit_cast<float>(bits + 1);
    if (!std::isfinite(high) || high > 1e20f || low < 1e-20f) continue;
    const double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2;
    for (const double value : {middle, std::nextafter(middle, 0.0), std::nextafter(middle, 1e30)}) {
      for (const int digits : {12, 17, 30, 60}) {
        std::snprintf(text, sizeof(text), "%.*g", digits, value);
        check_float(text);
        std::snprintf(text, sizeof(text), "%.*f", digits, value);
        check_float(text);
      }
    }
  }
}

TEST(data_floats_at_the_ends) {
  for (const char* text : {"0",
                           "-0",
                           "0.0",
                           ".5",
                           "5.",
                           "+1.5",
                           "-1.5",
                           "1e10",
                           "1E-10",
                           "1e+5",
                           "00001.5",
                           "16777217",
                           "3.4028235e38",
                           "3.4028236e38",
                           "1.17549435e-38",
                           "1e-45",
                           "7e-46",
                           "7.1e-46",
                           "1e-400",
                           "0e999999999999",
                           "0.00000000000000000000000000000000000000000001",
                           "1e-99999999999999999",
                           "12345678",
                           "123456789.123456789",
                           "0.12345678",
                           "0.1234567890123456789",
                           "9007199254740993",
                           "340282356779733661637539395458142568447",
                           "340282356779733661637539395458142568448",
                           "100000000000000000000000000000000000000000e-30",
                           "1e400",
                           "-1e39",
                           "1e99999999999999999"}) {
    check_float(text);
  }
  float found = 0;
  for (const char* text : {"nan", "NaN", "-nan", "inf", "-Infinity", "+INF", "nan(1)"}) {
    CHECK(float_of(text, found) == Fault::kNotFinite);
  }
  for (const char* text : {"", ".", "-", "+", "e5", ".e5", "1e", "1e+", "1e5.5", "1.2.3", "1x",
                           "0x1p3", "--1", "-+1", "1,5", " 1", "1 ", "na", "in"}) {
    CHECK(float_of(text, found) == Fault::kNotANumber);
  }
}
