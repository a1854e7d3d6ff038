// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Values of gradients and weights in the dtypes that they can have on the wire. Every section ends
// at a multiple of 8 bytes, as all arrays of payloads do.
#pragma once

#include <cstdint>

#include "wire/dtype.h"
#include "wire/primitives.h"

namespace cpudist::wire {

// What a scale of int8 covers of a dense block. Of a table it covers a row; rows of one or two
// values travel as bfloat16 instead, which is no longer.
inline constexpr uint64_t kScaledElements = 128;

uint64_t coded_rows_bytes(WireDType dtype, uint64_t row_count, uint64_t dim);
// Writes coded_rows_bytes() bytes.
void encode_rows(WireDType dtype, const float* rows, uint64_t row_count, uint64_t dim,
                 uint8_t* out);
// Throws Error(kProtocol) if the reader has fewer bytes.
void decode_rows_into(WireDType dtype, Reader* reader, uint64_t row_count, uint64_t dim,
                      float* rows);
// What its receiver will read, in place. Encoding it anew loses nothing.
void round_rows(WireDType dtype, float* rows, uint64_t row_count, uint64_t dim);

// The same of a dense float32 block: rows of kScaledElements, of which the last may be shorter.
uint64_t coded_block_bytes(WireDType dtype, uint64_t elements);
void encode_block(WireDType dtype, const float* values, uint64_t elements, uint8_t* out);
void decode_block_into(WireDType dtype, Reader* reader, uint64_t elements, float* values);
void round_block(WireDType dtype, float* values, uint64_t elements);

}  // namespace cpudist::wire
