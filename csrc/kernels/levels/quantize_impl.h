// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The loops of quantize.h, part of level_impl.h: inside its namespaces, once per vector level.
// Selects instead of branches, so that they become vector code.

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kLargestBfloat16 = 0x7f7fu;
constexpr uint32_t kLargestHalf = 0x7bffu;
// Adding it leaves a number below 2^22 rounded to a whole one, in the low bits.
constexpr float kWholeMagic = 12582912.0f;
constexpr float kLargestInt8 = 127.0f;

CPUDIST_INLINE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
CPUDIST_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

CPUDIST_INLINE uint32_t bfloat16_of(uint32_t bits) {
  const uint32_t magnitude = bits & ~kSignBit;
  const uint32_t sign = (bits & kSignBit) >> 16;
  const uint32_t rounded = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;
  const uint32_t finite = rounded > kLargestBfloat16 ? kLargestBfloat16 : rounded;
  const uint32_t special = magnitude > kInfinityBits ? 0x7fc0u : 0x7f80u;
  return sign | (magnitude >= kInfinityBits ? special : finite);
}

void to_bfloat16(const float* __restrict values, uint16_t* __restrict out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<uint16_t>(bfloat16_of(bits_of(values[i])));
}

void from_bfloat16(const uint16_t* __restrict values, float* __restrict out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = float_of(static_cast<uint32_t>(values[i]) << 16);
}

void to_half(const float* __restrict values, uint16_t* __restrict out, size_t n) {
  constexpr uint32_t kSmallestNormal = 113u << 23;  // 2^-14
  constexpr uint32_t kDenormalMagic = 126u << 23;   // 0.5: its last bit is the last of a half's
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(values[i]);
    const uint32_t magnitude = bits & ~kSignBit;
    const uint32_t sign = (bits & kSignBit) >> 16;
    const uint32_t odd = (magnitude >> 13) & 1u;
    const uint32_t normal = (magnitude - kRebias + 0xfffu + odd) >> 13;
    // The sum rounds to a multiple of 2^-24.
    const uint32_t sum = bits_of(float_of(magnitude) + float_of(kDenormalMagic));
    const uint32_t small = sum - kDenormalMagic;
    const uint32_t some = magnitude < kSmallestNormal ? small : normal;
    const uint32_t finite = some > kLargestHalf ? kLargestHalf : some;
    const uint32_t special = magnitude > kInfinityBits ? 0x7e00u : 0x7c00u;
    out[i] = static_cast<uint16_t>(sign | (magnitude >= kInfinityBits ? special : finite));
  }
}

void from_half(const uint16_t* __restrict values, float* __restrict out, size_t n) {
  constexpr uint32_t kExponent = 0x7c00u << 13;
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  constexpr uint32_t kSmallestNormal = 113u << 23;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t half = values[i];
    const uint32_t shifted = (half & 0x7fffu) << 13;
    const uint32_t exponent = shifted & kExponent;
    const uint32_t normal = shifted + kRebias;
    const uint32_t special = normal + kRebias;
    // 2^-14 and the fraction, less 2^-14: exact.
    const uint32_t small = bits_of(float_of(normal + (1u << 23)) - float_of(kSmallestNormal));
    const uint32_t finite = exponent == 0 ? small : normal;
    out[i] = float_of(((half & 0x8000u) << 16) | (exponent == kExponent ? special : finite));
  }
}

CPUDIST_INLINE void row_to_int8(const float* __restrict row, size_t dim, int8_t* __restrict out,
                                uint16_t* __restrict scale) {
  constexpr uint32_t kSmallestNormal = 1u << 23;
  constexpr uint32_t kQuietNan = 0x7fc0u;
  // Magnitudes compare as whole numbers, and NaN is above infinity: the maximum is exact.
  uint32_t largest = 0;
  for (size_t i = 0; i < dim; ++i) {
    const uint32_t magnitude = bits_of(row[i]) & ~kSignBit;
    largest = magnitude > largest ? magnitude : largest;
  }
  const uint32_t nearest = bfloat16_of(bits_of(float_of(largest) / kLargestInt8));
  const bool finite = largest < kInfinityBits;
  const bool empty = !finite || (nearest << 16) < kSmallestNormal;
  *scale = static_cast<uint16_t>(!finite ? kQuietNan : empty ? 0u : nearest);
  const float inverse = empty ? 0.0f : 1.0f / float_of(nearest << 16);
  for (size_t i = 0; i < dim; ++i) {
    const float value = finite ? row[i] : 0.0f;
    const uint32_t whole = bits_of(value * inverse + kWholeMagic) - bits_of(kWholeMagic);
    out[i] = static_cast<int8_t>(static_cast<int32_t>(whole));
  }
}

void to_int8(const float* rows, size_t row_count, size_t dim, int8_t* out, uint16_t* scales) {
  for (size_t i = 0; i < row_count; ++i) {
    row_to_int8(rows + i * dim, dim, out + i * dim, scales + i);
  }
}

CPUDIST_INLINE void row_from_int8(const int8_t* __restrict values, float scale, size_t dim,
                                  float* __restrict out) {
  for (size_t i = 0; i < dim; ++i) out[i] = static_cast<float>(values[i]) * scale;
}

void from_int8(const int8_t* values, const uint16_t* scales, size_t row_count, size_t dim,
               float* out) {
  for (size_t i = 0; i < row_count; ++i) {
    row_from_int8(values + i * dim, float_of(static_cast<uint32_t>(scales[i]) << 16), dim,
                  out + i * dim);
  }
}

// No __restrict: residue may be meant.
void residue_of(const float* meant, const float* sent, float* residue, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float difference = meant[i] - sent[i];
    const bool finite = (bits_of(difference) & ~kSignBit) < kInfinityBits;
    residue[i] = finite ? difference : 0.0f;
  }
}
