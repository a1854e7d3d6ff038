// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Binds the oneCCL backend.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <tuple>

#include "backends/c10d/backends.h"
#include "backends/ccl/backend.h"
#include "backends/ccl/library.h"

namespace cpudist::backends {

namespace {

// c10d's store, which has a key or waits for it, as one that is asked.
class StoreOfGroup final : public ccl::MemberStore {
 public:
  explicit StoreOfGroup(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  std::optional<std::string> get(const std::string& key) override {
    if (!store_->check({own(key)})) return std::nullopt;
    const std::vector<uint8_t> value = store_->get(own(key));
    return std::string(value.begin(), value.end());
  }

  void set(const std::string& key, const std::string& value) override {
    store_->set(own(key), std::vector<uint8_t>(value.begin(), value.end()));
  }

 private:
  static std::string own(const std::string& key) { return "oneccl/" + key; }

  c10::intrusive_ptr<c10d::Store> store_;
};

using PeerOf = std::tuple<int, int64_t, uint64_t>;

c10::intrusive_ptr<c10d::Backend> create(std::shared_ptr<ccl::Engine> engine,
                                         const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int size, int id, int64_t timeout_ms,
                                         const std::vector<PeerOf>& peers, bool checks) {
  ccl::GroupOptions options;
  options.rank = rank;
  options.size = size;
  options.id = id;
  options.timeout = std::chrono::milliseconds(timeout_ms);
  options.store = std::make_unique<StoreOfGroup>(store);
  for (const auto& [peer, pid, started] : peers) {
    options.peers.push_back(ccl::Peer{peer, pid, started});
  }
  return c10::make_intrusive<ccl::CclBackend>(std::move(engine), std::move(options), checks);
}

}  // namespace

void bind_ccl(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<ccl::Engine, std::shared_ptr<ccl::Engine>>(module, "CclEngine")
      .def(py::init([](const std::string& library) {
             return std::make_shared<ccl::Engine>(ccl::load(library));
           }),
           py::arg("library"), Released())
      .def_property_readonly("release",
                             [](const ccl::Engine& engine) { return engine.calls().release(); })
      .def("stop", &ccl::Engine::stop, Released());
  module.def("create_ccl", &create, py::kw_only(), py::arg("engine"), py::arg("store"),
             py::arg("rank"), py::arg("size"), py::arg("id"), py::arg("timeout_ms"),
             py::arg("peers"), py::arg("checks"), Released());
}

}  // namespace cpudist::backends
