// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The checksum of frames and of records that travel or are kept.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpudist {

// CRC-32C (Castagnoli); SSE4.2 with three interleaved lanes where the CPU has it, else tables.
uint32_t crc32c(const void* data, size_t size_bytes, uint32_t seed = 0);

// Its single paths, for tests that compare them: slicing-by-8, which needs no special instruction,
// and whether crc32c() runs on the CPU's crc32 instruction.
uint32_t crc32c_table(const void* data, size_t size_bytes, uint32_t seed = 0);
bool crc32c_has_hardware();

}  // namespace cpudist
