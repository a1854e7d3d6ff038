// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How long to wait before another attempt to connect.
#pragma once

#include <chrono>
#include <cstdint>

namespace cpudist::transport {

// 20 to 59 ms, another for each who tries and each time: many who were sent away at once must not
// come back at once. The same in every run, as simulated ones are to be.
inline std::chrono::milliseconds retry_pause(uint64_t who, uint64_t whom, uint64_t attempt) {
  uint64_t mixed = who * 0x9e3779b97f4a7c15u + whom * 0xc2b2ae3d27d4eb4fu + attempt;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  return std::chrono::milliseconds(20 + (mixed ^ (mixed >> 31)) % 40);
}

}  // namespace cpudist::transport
