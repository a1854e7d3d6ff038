// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The module _c10d: one function of each backend that makes it. This file includes no torch header,
// which each file that does pays with half a minute.
#include "backends/c10d/backends.h"

PYBIND11_MODULE(_c10d, module) {
  module.doc() = "Backends of torch.distributed; see _c10d.pyi.";
  cpudist::backends::bind_shm(module);
  cpudist::backends::bind_ccl(module);
  cpudist::backends::bind_transport(module);
}
