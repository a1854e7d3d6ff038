// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Copies of scattered rows. Rows are bytes, so every dtype is served by one kernel. Indices must
// have been checked against the number of rows by the caller.

#pragma once

#include <cstddef>
#include <cstdint>

namespace cpudist::kernels {

// out row i = source row index[i]. Strides are in bytes. Index is int64_t or uint32_t.
template <typename Index>
void gather_rows(const void* source, size_t source_stride_bytes, const Index* index, size_t n,
                 size_t row_bytes, void* out, size_t out_stride_bytes);

// target row index[i] = source row i, in the order of i: the last of equal indices stays.
template <typename Index>
void scatter_rows(void* target, size_t target_stride_bytes, const Index* index, size_t n,
                  size_t row_bytes, const void* source, size_t source_stride_bytes);

// out row i = the row at rows[i]; for rows that lie in several slabs.
void gather_pointers(const void* const* rows, size_t n, size_t row_bytes, void* out,
                     size_t out_stride_bytes);

// the row at rows[index[i]] = source row i, in the order of i.
void scatter_pointers(void* const* rows, const uint32_t* index, size_t n, size_t row_bytes,
                      const void* source, size_t source_stride_bytes);

// The position of the first index outside [0, rows), or n when there is none.
size_t find_out_of_range(const int64_t* index, size_t n, int64_t rows);

}  // namespace cpudist::kernels
