// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The clock that deadlines are measured with.
#pragma once

#include <chrono>

namespace cpudist {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

}  // namespace cpudist
