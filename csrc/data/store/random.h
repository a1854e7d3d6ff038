// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Random numbers that are the same on every machine: xoshiro256** (Blackman and Vigna 2018),
// seeded by SplitMix64, and the shuffle of Fisher and Yates.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>

#include "kernels/hash.h"

namespace cpudist::data {

class Random {
 public:
  // Different for every list of numbers.
  explicit Random(std::initializer_list<uint64_t> seeds) {
    uint64_t state = 0;
    for (const uint64_t seed : seeds) state = kernels::mix64(state + kGolden) ^ seed;
    for (uint64_t& word : state_) word = kernels::mix64(state += kGolden);
  }

  uint64_t next() {
    const uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  // Uniform in [0, bound), without bias (Lemire 2019). bound > 0.
  uint64_t below(uint64_t bound) {
    __extension__ using Wide = unsigned __int128;
    Wide product = Wide{next()} * bound;
    if (static_cast<uint64_t>(product) < bound) {
      const uint64_t least = (0 - bound) % bound;
      while (static_cast<uint64_t>(product) < least) product = Wide{next()} * bound;
    }
    return static_cast<uint64_t>(product >> 64);
  }

 private:
  static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
  std::array<uint64_t, 4> state_{};
};

// Every order is as likely as any other.
template <typename T>
void shuffle(std::span<T> items, Random& random) {
  for (size_t left = items.size(); left > 1; --left) {
    std::swap(items[left - 1], items[random.below(left)]);
  }
}

}  // namespace cpudist::data
