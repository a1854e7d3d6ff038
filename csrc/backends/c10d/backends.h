// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The parts of the Python module _c10d: one of each backend, and what carries frames over any.
#pragma once

#include <pybind11/pybind11.h>

namespace cpudist::backends {

namespace py = pybind11;

void bind_shm(py::module_& module);
void bind_ccl(py::module_& module);
void bind_transport(py::module_& module);

}  // namespace cpudist::backends
