// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace cpudist::wire {

// What float32 values become on the wire. float64 values travel as they are.
enum class WireDType : uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kInt8 = 3,  // with a bfloat16 scale per row; pushes only
};

inline constexpr uint32_t kWireDTypeCount = 4;

inline const char* name_of(WireDType dtype) {
  constexpr const char* kNames[kWireDTypeCount] = {"fp32", "bf16", "fp16", "int8"};
  return static_cast<uint32_t>(dtype) < kWireDTypeCount ? kNames[static_cast<uint32_t>(dtype)]
                                                        : "unknown";
}

}  // namespace cpudist::wire
