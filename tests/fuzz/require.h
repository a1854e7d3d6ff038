// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What has to hold of every input.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace cpudist::fuzz {

// Unlike assert, in every build.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

}  // namespace cpudist::fuzz
