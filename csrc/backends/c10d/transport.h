// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Binds what carries frames over any backend.
#pragma once

#include <pybind11/pybind11.h>

namespace cpudist::backends {

void bind_transport(pybind11::module_& module);

}  // namespace cpudist::backends
