// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Changes inputs at random, the same way for the same seed: bits, bytes, tokens, lines, numbers at
// the ends of their ranges, and parts of other inputs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

namespace cpudist::fuzz {

using Input = std::vector<uint8_t>;

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : generator_(seed) {}

  // Writes one of the pool's inputs with one to eight changes to `input`.
  void mutate(const std::vector<Input>& pool, Input& input) {
    input = pool[below(pool.size())];
    for (size_t changes = 1 + below(8) * below(2); changes > 0; --changes) {
      change(pool, input);
    }
    if (input.size() > kSizeLimit) input.resize(kSizeLimit);
  }

 private:
  static constexpr size_t kSizeLimit = 4096;
  static constexpr size_t kPieceLimit = 64;
  static constexpr std::string_view kTexts[] = {"0",
                                                "1",
                                                "-1",
                                                "2",
                                                "9",
                                                "00",
                                                "7fffffffffffffff",
                                                "ffffffffffffffff",
                                                "12345678",
                                                "9223372036854775807",
                                                "-9223372036854775808",
                                                "9223372036854775808",
                                                "18446744073709551616",
                                                "4294967296",
                                                "16777217",
                                                "1e39",
                                                "3.4028236e38",
                                                "1e-46",
                                                "0.1234567890123456789",
                                                "1e99999999999",
                                                "nan",
                                                "-inf",
                                                ".",
                                                "e",
                                                "+",
                                                "-",
                                                ".5",
                                                "5.",
                                                " ",
                                                "  ",
                                                "\t",
                                                "\t\t",
                                                "\n",
                                                "\r\n",
                                                ",",
                                                ",,",
                                                "\"",
                                                "\"\"",
                                                "|",
                                                "||",
                                                "1 ",
                                                " 1",
                                                "0 ",
                                                "x",
                                                "\x80",
                                                "\xff\xff"};

  size_t below(size_t bound) { return bound == 0 ? 0 : generator_() % bound; }

  void change(const std::vector<Input>& pool, Input& input) {
    const size_t at = below(input.size() + 1);
    switch (below(10)) {
      case 0:
        if (at < input.size()) input[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:
        if (at < input.size()) input[at] = static_cast<uint8_t>(generator_());
        break;
      case 2:
        erase(input, at, 1 + below(kPieceLimit));
        break;
      case 3:
        insert(input, at, text());
        break;
      case 4: {
        const size_t end = token_end(input, at);
        erase(input, at, end - at);
        insert(input, at, text());
        break;
      }
      case 5:
        insert(input, at, piece(input, below(input.size() + 1), 1 + below(kPieceLimit)));
        break;
      case 6:
        insert(input, at, line(input, below(input.size() + 1)));
        break;
      case 7: {
        const Input& other = pool[below(pool.size())];
        insert(input, at, piece(other, below(other.size() + 1), 1 + below(4 * kPieceLimit)));
        break;
      }
      case 8: {
        const Input& other = pool[below(pool.size())];
        input.resize(at);
        const Input rest = piece(other, below(other.size() + 1), other.size());
        input.insert(input.end(), rest.begin(), rest.end());
        break;
      }
      default:
        insert(input, at, Input(1 + below(20), static_cast<uint8_t>('0' + below(10))));
    }
  }

  Input text() {
    const std::string_view chosen = kTexts[below(std::size(kTexts))];
    return {chosen.begin(), chosen.end()};
  }

  static bool ends_token(uint8_t byte) {
    return byte == ' ' || byte == '\t' || byte == '\n' || byte == ',' || byte == '|';
  }
  static size_t token_end(const Input& input, size_t at) {
    while (at < input.size() && !ends_token(input[at])) ++at;
    return at;
  }
  static Input piece(const Input& input, size_t at, size_t size) {
    const auto begin = input.begin() + static_cast<std::ptrdiff_t>(at);
    return {begin, begin + static_cast<std::ptrdiff_t>(std::min(size, input.size() - at))};
  }
  static Input line(const Input& input, size_t at) {
    const auto begin = input.begin() + static_cast<std::ptrdiff_t>(at);
    const auto end = std::find(begin, input.end(), '\n');
    return {begin, end == input.end() ? end : end + 1};
  }
  static void erase(Input& input, size_t at, size_t size) {
    const auto begin = input.begin() + static_cast<std::ptrdiff_t>(at);
    input.erase(begin, begin + static_cast<std::ptrdiff_t>(std::min(size, input.size() - at)));
  }
  static void insert(Input& input, size_t at, const Input& what) {
    input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), what.begin(), what.end());
  }

  std::mt19937_64 generator_;
};

}  // namespace cpudist::fuzz
