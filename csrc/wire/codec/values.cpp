// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "wire/codec/values.h"

#include <algorithm>
#include <cstring>

#include "base/errors.h"
#include "kernels/aligned.h"
#include "kernels/quantize.h"
#include "wire/bulk.h"

namespace cpudist::wire {
namespace {

// Rows that are rounded at a time.
constexpr uint64_t kChunkElements = 4096;

uint64_t scales_bytes(uint64_t row_count) { return section_bytes(row_count, sizeof(uint16_t)); }

void pad(uint8_t* out, uint64_t size_bytes) {
  std::memset(out + size_bytes, 0, padded(size_bytes) - size_bytes);
}

[[noreturn]] void refuse_dtype() {
  throw Error(ErrorCode::kInternal, "values of a dtype that the wire does not have");
}

// `rows` of `dim`; the block form gives one shorter row after whole ones.
struct Rows {
  uint64_t count;
  uint64_t dim;
  uint64_t tail;  // elements of one more row, or 0
  uint64_t elements() const { return count * dim + tail; }
  uint64_t scales() const { return count + (tail > 0 ? 1 : 0); }
};

Rows of_table(uint64_t row_count, uint64_t dim) { return {row_count, dim, 0}; }
Rows of_block(uint64_t elements) {
  return {elements / kScaledElements, kScaledElements, elements % kScaledElements};
}

uint64_t coded_bytes(WireDType dtype, uint64_t scales, uint64_t elements) {
  switch (dtype) {
    case WireDType::kFloat32:
      return section_bytes(elements, sizeof(float));
    case WireDType::kBFloat16:
    case WireDType::kFloat16:
      return section_bytes(elements, sizeof(uint16_t));
    case WireDType::kInt8:
      return checked_add(scales_bytes(scales), section_bytes(elements, 1));
  }
  refuse_dtype();
}

void encode(WireDType dtype, const float* values, const Rows& rows, uint8_t* out) {
  const uint64_t n = rows.elements();
  switch (dtype) {
    case WireDType::kFloat32:
      if (n > 0) std::memcpy(out, values, n * sizeof(float));
      return pad(out, n * sizeof(float));
    case WireDType::kBFloat16:
      kernels::to_bfloat16(values, reinterpret_cast<uint16_t*>(out), n);
      return pad(out, n * sizeof(uint16_t));
    case WireDType::kFloat16:
      kernels::to_half(values, reinterpret_cast<uint16_t*>(out), n);
      return pad(out, n * sizeof(uint16_t));
    case WireDType::kInt8: {
      auto* scales = reinterpret_cast<uint16_t*>(out);
      uint8_t* whole = out + scales_bytes(rows.scales());
      auto* numbers = reinterpret_cast<int8_t*>(whole);
      const uint64_t full = rows.count * rows.dim;
      kernels::to_int8(values, rows.count, rows.dim, numbers, scales);
      if (rows.tail > 0) {
        kernels::to_int8(values + full, 1, rows.tail, numbers + full, scales + rows.count);
      }
      pad(out, rows.scales() * sizeof(uint16_t));
      return pad(whole, n);
    }
  }
  refuse_dtype();
}

void decode(WireDType dtype, Reader* reader, const Rows& rows, float* values) {
  const uint64_t n = rows.elements();
  switch (dtype) {
    case WireDType::kFloat32: {
      const auto found = reader->array<float>(n);
      if (n > 0) std::memcpy(values, found.data(), n * sizeof(float));
      return;
    }
    case WireDType::kBFloat16:
      return kernels::from_bfloat16(reader->array<uint16_t>(n).data(), values, n);
    case WireDType::kFloat16:
      return kernels::from_half(reader->array<uint16_t>(n).data(), values, n);
    case WireDType::kInt8: {
      const auto scales = reader->array<uint16_t>(rows.scales());
      const auto numbers = reader->array<int8_t>(n);
      const uint64_t full = rows.count * rows.dim;
      kernels::from_int8(numbers.data(), scales.data(), rows.count, rows.dim, values);
      if (rows.tail == 0) return;
      kernels::from_int8(numbers.data() + full, scales.data() + rows.count, 1, rows.tail,
                         values + full);
      return;
    }
  }
  refuse_dtype();
}

// At most kChunkElements of them, or one row of int8.
void round(WireDType dtype, float* values, const Rows& rows) {
  const uint64_t n = rows.elements();
  alignas(64) uint16_t numbers[kChunkElements];
  switch (dtype) {
    case WireDType::kFloat32:
      return;
    case WireDType::kBFloat16:
      kernels::to_bfloat16(values, numbers, n);
      return kernels::from_bfloat16(numbers, values, n);
    case WireDType::kFloat16:
      kernels::to_half(values, numbers, n);
      return kernels::from_half(numbers, values, n);
    case WireDType::kInt8: {
      uint16_t scales[kChunkElements];
      auto* whole = reinterpret_cast<int8_t*>(numbers);
      const uint64_t full = rows.count * rows.dim;
      kernels::to_int8(values, rows.count, rows.dim, whole, scales);
      kernels::from_int8(whole, scales, rows.count, rows.dim, values);
      if (rows.tail == 0) return;
      kernels::to_int8(values + full, 1, rows.tail, whole, scales);
      return kernels::from_int8(whole, scales, 1, rows.tail, values + full);
    }
  }
  refuse_dtype();
}

// Where a scale would be as long as the numbers that it saves.
WireDType of_rows(WireDType dtype, uint64_t dim) {
  return dtype == WireDType::kInt8 && dim <= 2 ? WireDType::kBFloat16 : dtype;
}

// A row that is longer than a chunk.
void round_long_row(float* row, uint64_t dim) {
  kernels::AlignedBuffer<int8_t> numbers(dim);
  uint16_t scale;
  kernels::to_int8(row, 1, dim, numbers.data(), &scale);
  kernels::from_int8(numbers.data(), &scale, 1, dim, row);
}

}  // namespace

uint64_t coded_rows_bytes(WireDType dtype, uint64_t row_count, uint64_t dim) {
  return coded_bytes(of_rows(dtype, dim), row_count, checked_multiply(row_count, dim));
}

void encode_rows(WireDType dtype, const float* rows, uint64_t row_count, uint64_t dim,
                 uint8_t* out) {
  encode(of_rows(dtype, dim), rows, of_table(row_count, dim), out);
}

void decode_rows_into(WireDType dtype, Reader* reader, uint64_t row_count, uint64_t dim,
                      float* rows) {
  decode(of_rows(dtype, dim), reader, of_table(row_count, dim), rows);
}

void round_rows(WireDType dtype, float* rows, uint64_t row_count, uint64_t dim) {
  dtype = of_rows(dtype, dim);
  if (dtype == WireDType::kFloat32) return;
  if (dtype != WireDType::kInt8) {
    const uint64_t n = row_count * dim;
    for (uint64_t at = 0; at < n; at += kChunkElements) {
      round(dtype, rows + at, of_table(std::min(kChunkElements, n - at), 1));
    }
    return;
  }
  const uint64_t step = kChunkElements / dim;
  for (uint64_t at = 0; at < row_count; at += std::max<uint64_t>(step, 1)) {
    if (step == 0) {
      round_long_row(rows + at * dim, dim);
    } else {
      round(dtype, rows + at * dim, of_table(std::min(step, row_count - at), dim));
    }
  }
}

uint64_t coded_block_bytes(WireDType dtype, uint64_t elements) {
  return coded_bytes(dtype, of_block(elements).scales(), elements);
}

void encode_block(WireDType dtype, const float* values, uint64_t elements, uint8_t* out) {
  encode(dtype, values, of_block(elements), out);
}

void decode_block_into(WireDType dtype, Reader* reader, uint64_t elements, float* values) {
  decode(dtype, reader, of_block(elements), values);
}

void round_block(WireDType dtype, float* values, uint64_t elements) {
  if (dtype == WireDType::kFloat32) return;
  static_assert(kChunkElements % kScaledElements == 0, "a scale covers no two chunks");
  for (uint64_t at = 0; at < elements; at += kChunkElements) {
    round(dtype, values + at, of_block(std::min(kChunkElements, elements - at)));
  }
}

}  // namespace cpudist::wire
