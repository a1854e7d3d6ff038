// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The single paths behind crc32c(), for tests that compare them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpudist::core {

// Slicing-by-8; needs no special instruction.
uint32_t crc32c_table(const void* data, size_t size_bytes, uint32_t seed = 0);
// True when crc32c() runs on the CPU's crc32 instruction.
bool crc32c_has_hardware();

}  // namespace cpudist::core
