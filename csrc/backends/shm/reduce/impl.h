// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The loops of `reduce`, in the namespace CPUDIST_LEVEL of the file that includes this one.
// Two sources are reduced in one pass, more through a block of accumulators that stays in cache.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

// Element i depends on elements i only, also where `out` is one of the sources.
#if defined(__clang__)
#define CPUDIST_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define CPUDIST_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace cpudist::shm::CPUDIST_LEVEL {

namespace {

constexpr size_t kBlock = 512;

// A stored element, and the type it is computed in.
template <typename T>
struct Plain {
  using Stored = T;
  using Computed = T;
  static Computed load(Stored value) { return value; }
  static Stored store(Computed value) { return value; }
};

// An integer that is summed in a type that no sum of as many as there can be ranks leaves.
__extension__ using Int128 = __int128;
template <typename T>
struct Exact {
  using Stored = T;
  using Computed = std::conditional_t<sizeof(T) <= 2, int32_t,
                                      std::conditional_t<sizeof(T) == 4, int64_t, Int128>>;
  static Computed load(Stored value) { return value; }
  static Stored store(Computed value) { return static_cast<Stored>(value); }
};

struct Bf16 {
  using Stored = uint16_t;
  using Computed = float;
  static float load(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }
  static uint16_t store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t even = bits + 0x7fffU + ((bits >> 16) & 1U);
    const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
    return static_cast<uint16_t>(nan ? 0x7fc0U : even >> 16);
  }
};

struct F16 {
  using Stored = uint16_t;
  using Computed = float;
#if defined(CPUDIST_F16C)
  static float load(uint16_t value) { return _cvtsh_ss(value); }
  static uint16_t store(float value) {
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#else
  static float load(uint16_t value) {
    const uint32_t sign = uint32_t{value & 0x8000U} << 16;
    const uint32_t rest = uint32_t{value & 0x7fffU} << 13;
    const uint32_t exponent = rest & 0x0f800000U;
    if (exponent == 0x0f800000U) {  // infinity, NaN (made quiet, as the instruction does)
      const uint32_t quiet = (rest & 0x007fffffU) != 0 ? 0x00400000U : 0U;
      return std::bit_cast<float>(sign | (rest + 0x70000000U) | quiet);
    }
    if (exponent == 0) {  // zero, subnormal
      const float small = std::bit_cast<float>(rest + 0x38800000U) - 0x1p-14F;
      return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(small));
    }
    return std::bit_cast<float>(sign | (rest + 0x38000000U));
  }
  static uint16_t store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000U;
    const uint32_t rest = bits & 0x7fffffffU;
    uint32_t half = 0;
    if (rest > 0x7f800000U) {
      half = 0x7e00U | ((rest >> 13) & 0x3ffU);
    } else if (rest >= 0x477ff000U) {  // rounds to infinity
      half = 0x7c00U;
    } else if (rest < 0x38800000U) {  // subnormal: float's own rounding does it
      half = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5F) - 0x3f000000U;
    } else {
      half = (rest - 0x38000000U + 0xfffU + ((rest >> 13) & 1U)) >> 13;
    }
    return static_cast<uint16_t>(sign | half);
  }
#endif
};

// Wraps: computed unsigned, in 32 bits at least, lest small types are promoted to int.
template <typename T>
using Wrapping = std::conditional_t<(sizeof(T) > 4), uint64_t, uint32_t>;

struct Sum {
  template <typename C>
  static C apply(C a, C b) {
    // Whether 128 bits count as integral depends on the library; their sums do not wrap.
    if constexpr (std::is_integral_v<C> && sizeof(C) <= sizeof(uint64_t)) {
      return static_cast<C>(static_cast<Wrapping<C>>(a) + static_cast<Wrapping<C>>(b));
    } else {
      return a + b;
    }
  }
};
struct Product {
  template <typename C>
  static C apply(C a, C b) {
    if constexpr (std::is_integral_v<C>) {
      return static_cast<C>(static_cast<Wrapping<C>>(a) * static_cast<Wrapping<C>>(b));
    } else {
      return a * b;
    }
  }
};
struct Min {
  template <typename C>
  static C apply(C a, C b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Max {
  template <typename C>
  static C apply(C a, C b) {
    return (a > b) | (a != a) ? a : b;
  }
};
struct And {
  static uint8_t apply(uint8_t a, uint8_t b) { return a & b; }
};
struct Or {
  static uint8_t apply(uint8_t a, uint8_t b) { return a | b; }
};
struct Xor {
  static uint8_t apply(uint8_t a, uint8_t b) { return a ^ b; }
};

// Divides by the number of ranks: a power of two is multiplied by its inverse, which rounds the
// same and is faster.
template <typename C>
struct Divide {
  explicit Divide(int divisor)
      : divisor_(static_cast<C>(divisor)), exact_(std::has_single_bit(unsigned(divisor))) {}

  void apply(C* values, size_t n) const {
    if constexpr (std::is_floating_point_v<C>) {
      const C factor = C{1} / divisor_;
      if (exact_) {
        for (size_t i = 0; i < n; ++i) values[i] *= factor;
        return;
      }
    }
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<C>(values[i] / divisor_);
  }

 private:
  C divisor_;
  bool exact_;
};

template <typename E>
void widen(typename E::Computed* to, const typename E::Stored* from, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = E::load(from[i]);
}

template <typename E>
void narrow(typename E::Stored* to, const typename E::Computed* from, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = E::store(from[i]);
}

#if defined(CPUDIST_F16C)
template <>
inline void widen<F16>(float* to, const uint16_t* from, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < n; ++i) to[i] = F16::load(from[i]);
}

template <>
inline void narrow<F16>(uint16_t* to, const float* from, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves =
        _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < n; ++i) to[i] = F16::store(from[i]);
}
#endif

template <typename E, typename Op>
void two(typename E::Stored* out, const typename E::Stored* a, const typename E::Stored* b,
         size_t count) {
  CPUDIST_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    out[i] = E::store(Op::apply(E::load(a[i]), E::load(b[i])));
  }
}

template <typename E, typename Op>
void several(typename E::Stored* out, const void* const* sources, int n, size_t count,
             int divisor) {
  using Stored = typename E::Stored;
  using Computed = typename E::Computed;
  const Divide<Computed> divide(divisor);
  Computed sums[kBlock], others[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = std::min(kBlock, count - begin);
    widen<E>(sums, static_cast<const Stored*>(sources[0]) + begin, length);
    for (int source = 1; source < n; ++source) {
      const auto* next = static_cast<const Stored*>(sources[source]) + begin;
      if constexpr (std::is_same_v<Stored, Computed>) {
        for (size_t i = 0; i < length; ++i) sums[i] = Op::apply(sums[i], next[i]);
      } else {
        widen<E>(others, next, length);
        for (size_t i = 0; i < length; ++i) sums[i] = Op::apply(sums[i], others[i]);
      }
    }
    if (divisor != 1) divide.apply(sums, length);
    narrow<E>(out + begin, sums, length);
  }
}

template <typename E, typename Op>
void loop(void* out, const void* const* sources, int n, size_t count, int divisor) {
  using Stored = typename E::Stored;
  if constexpr (std::is_same_v<Op, Sum> && std::is_integral_v<typename E::Computed>) {
    if (divisor != 1) {
      several<Exact<Stored>, Sum>(static_cast<Stored*>(out), sources, n, count, divisor);
      return;
    }
  }
  // Conversions of float16 are vector instructions in blocks only.
  if (n == 2 && divisor == 1 && !std::is_same_v<E, F16>) {
    two<E, Op>(static_cast<Stored*>(out), static_cast<const Stored*>(sources[0]),
               static_cast<const Stored*>(sources[1]), count);
  } else {
    several<E, Op>(static_cast<Stored*>(out), sources, n, count, divisor);
  }
}

#define CPUDIST_ARITHMETIC(E) {&loop<E, Sum>, &loop<E, Product>, &loop<E, Min>, &loop<E, Max>}

constexpr ReduceTable kTable = {
    {CPUDIST_ARITHMETIC(Plain<float>), CPUDIST_ARITHMETIC(Plain<double>), CPUDIST_ARITHMETIC(Bf16),
     CPUDIST_ARITHMETIC(F16), CPUDIST_ARITHMETIC(Plain<int8_t>), CPUDIST_ARITHMETIC(Plain<uint8_t>),
     CPUDIST_ARITHMETIC(Plain<int16_t>), CPUDIST_ARITHMETIC(Plain<int32_t>),
     CPUDIST_ARITHMETIC(Plain<int64_t>)},
    {&loop<Plain<uint8_t>, And>, &loop<Plain<uint8_t>, Or>, &loop<Plain<uint8_t>, Xor>},
};

#undef CPUDIST_ARITHMETIC

}  // namespace

}  // namespace cpudist::shm::CPUDIST_LEVEL
