// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The module _core and its free functions.
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/errors.h"
#include "base/hmac.h"
#include "bind/bind.h"
#include "bind/lent.h"
#include "bind/secret.h"
#include "kernels/hash.h"
#include "kernels/levels/simd.h"
#include "kernels/slicing.h"
#include "wire/frame.h"
#include "wire/layout.h"

namespace cpudist::bind {

namespace {

std::vector<std::pair<int64_t, int64_t>> slice_parameter(int64_t elements, int64_t row_width,
                                                         int64_t server_count,
                                                         int64_t min_block_size, bool slice) {
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (const auto& span :
       kernels::slice_parameter(elements, row_width, server_count, min_block_size, slice)) {
    spans.emplace_back(span.begin, span.size);
  }
  return spans;
}

std::vector<uint32_t> owner_of_keys(const std::vector<int64_t>& keys, const std::string& table,
                                    uint32_t server_count) {
  if (server_count == 0) {
    throw Error(ErrorCode::kInvalidArgument, "owner_of_keys: server_count must be at least 1");
  }
  const uint64_t salt = kernels::table_salt(table);
  std::vector<uint32_t> owners;
  for (const int64_t key : keys) {
    owners.push_back(wire::owner_of_bucket(kernels::bucket_of(key, salt), server_count));
  }
  return owners;
}

uint32_t crc32c_of(const py::object& data, uint32_t begin) {
  const Lent lent(data);
  const GilReleased release;
  return crc32c(lent.data(), lent.size_bytes(), begin);
}

}  // namespace

void bind_helpers(py::module_& module) {
  module.def("slice_parameter", &slice_parameter, py::arg("elements"), py::arg("row_width"),
             py::arg("server_count"), py::arg("min_block_size"), py::arg("slice"));
  module.def("owner_of_keys", &owner_of_keys, py::arg("keys"), py::arg("table"),
             py::arg("server_count"));
  module.def("crc32c", &crc32c_of, py::arg("data"), py::arg("begin") = 0);
  module.def("open_libcrypto", &open_libcrypto);
  module.def("simd_level", [] { return kernels::simd_level_name(kernels::simd_level()); });
}

}  // namespace cpudist::bind

PYBIND11_MODULE(_core, module) {
  module.doc() = "Servers, clients and their settings; see _core.pyi.";
  cpudist::bind::bind_errors(module);
  cpudist::bind::bind_secret(module);
  cpudist::bind::bind_layout(module);
  cpudist::bind::bind_network(module);
  cpudist::bind::bind_server(module);
  cpudist::bind::bind_client(module);
  cpudist::bind::bind_data(module);
  cpudist::bind::bind_inference(module);
  cpudist::bind::bind_helpers(module);
}
