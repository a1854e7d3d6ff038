// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The library that shim.h describes, loaded at run time: _c10d itself never links oneCCL.
#pragma once

#include <string>

#include "backends/ccl/shim/shim.h"

namespace cpudist::backends::ccl {

// Loads and starts oneCCL, which stays loaded until the process ends: it cannot be started twice.
// Throws Error(kInvalidArgument) if it does not load, is of another version, or does not start.
const cpudist_ccl_shim& load(const std::string& path);

}  // namespace cpudist::backends::ccl
