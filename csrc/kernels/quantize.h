// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Numbers of fewer bits, for the wire: float32 to bfloat16, IEEE half and int8 with a scale per
// row, and back. Rounding is to nearest, ties to even; the operations are integer ones, or single
// IEEE operations on normal numbers, so that every vector level gives the same bits.

#pragma once

#include <cstddef>
#include <cstdint>

namespace cpudist::kernels {

// A finite value stays finite: what would round to infinity becomes the largest finite number
// (half: 65504). Infinity stays, every NaN becomes the quiet one of its sign.
void to_bfloat16(const float* values, uint16_t* out, size_t n);
void from_bfloat16(const uint16_t* values, float* out, size_t n);
void to_half(const float* values, uint16_t* out, size_t n);
void from_half(const uint16_t* values, float* out, size_t n);

// Rows of `dim` values as whole numbers in [-127, 127] times a scale per row, the bfloat16 nearest
// to max|x| / 127. A row whose scale would be below 2^-126 gets scale 0 and zeros; one with a value
// that is not finite gets the scale NaN, and decodes to NaN. What from_int8 gives becomes the same
// numbers and scales again.
void to_int8(const float* rows, size_t row_count, size_t dim, int8_t* out, uint16_t* scales);
void from_int8(const int8_t* values, const uint16_t* scales, size_t row_count, size_t dim,
               float* out);

// Error feedback: given what was meant and what is sent of it, residue = meant - sent, 0 where that
// is not finite. residue may be meant.
void residue_of(const float* meant, const float* sent, float* residue, size_t n);

}  // namespace cpudist::kernels
