// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Loads the shim.
#include "backends/ccl/library.h"

#include <dlfcn.h>

#include <string>

#include "base/errors.h"

namespace cpudist::backends::ccl {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); }

}  // namespace

const cpudist_ccl_shim& load(const std::string& path) {
  // RTLD_LOCAL keeps the symbols of oneCCL and of what it loads away from those of others.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) refuse(std::string("cannot load it: ") + dlerror());
  const auto open = reinterpret_cast<cpudist_ccl_open_t>(dlsym(handle, CPUDIST_CCL_OPEN));
  if (open == nullptr) refuse(path + " has no " CPUDIST_CCL_OPEN);
  char error[512] = "";
  const cpudist_ccl_shim* calls = open(error, sizeof(error));
  if (calls == nullptr) refuse(std::string("it does not start: ") + error);
  if (calls->version != CPUDIST_CCL_SHIM_VERSION) {
    refuse(path + " was compiled from another version of this package");
  }
  return *calls;
}

}  // namespace cpudist::backends::ccl
