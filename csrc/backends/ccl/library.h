// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The library that shim.h describes, loaded at run time: _c10d itself never links oneCCL.
#pragma once

#include <string>

#include "backends/ccl/shim/shim.h"

namespace cpudist::backends::ccl {

// Loads and starts oneCCL. It stays loaded until the process ends: oneCCL cannot be started twice.
class Library {
 public:
  // Throws std::runtime_error if it does not load, is of another version, or does not start.
  explicit Library(const std::string& path);

  const cpudist_ccl_shim& calls() const { return *calls_; }

 private:
  const cpudist_ccl_shim* calls_;
};

}  // namespace cpudist::backends::ccl
