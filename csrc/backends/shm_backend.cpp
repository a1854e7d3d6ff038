// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The c10d backend over shared memory.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include "backends/backends.h"

namespace cpudist::backends {

void bind_shm(py::module_& module) { module.attr("TORCH_VERSION") = TORCH_VERSION; }

}  // namespace cpudist::backends
