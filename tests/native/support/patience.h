// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How long native tests wait for what must come: the one deadline of tests that time nothing.
// Reached by a failing test only, and so long that a thread sanitizer beside many busy programs
// gets there.
#pragma once

#include <chrono>

namespace cpudist::testing {

constexpr auto kPatience = std::chrono::seconds(300);

}  // namespace cpudist::testing
