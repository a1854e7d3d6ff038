// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// quantize.h on top of the kernel table.

#include "kernels/quantize.h"

#include "kernels/levels/table.h"

namespace cpudist::kernels {

void to_bfloat16(const float* values, uint16_t* out, size_t n) {
  current_kernels().quantize.to_bfloat16(values, out, n);
}

void from_bfloat16(const uint16_t* values, float* out, size_t n) {
  current_kernels().quantize.from_bfloat16(values, out, n);
}

void to_half(const float* values, uint16_t* out, size_t n) {
  current_kernels().quantize.to_half(values, out, n);
}

void from_half(const uint16_t* values, float* out, size_t n) {
  current_kernels().quantize.from_half(values, out, n);
}

void to_int8(const float* rows, size_t row_count, size_t dim, int8_t* out, uint16_t* scales) {
  current_kernels().quantize.to_int8(rows, row_count, dim, out, scales);
}

void from_int8(const int8_t* values, const uint16_t* scales, size_t row_count, size_t dim,
               float* out) {
  current_kernels().quantize.from_int8(values, scales, row_count, dim, out);
}

void residue_of(const float* meant, const float* sent, float* residue, size_t n) {
  current_kernels().quantize.residue_of(meant, sent, residue, n);
}

}  // namespace cpudist::kernels
