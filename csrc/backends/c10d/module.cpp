// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The module _c10d: makes backends over a c10d store. One file binds all of them, since each that
// includes torch's headers pays with half a minute.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <numeric>
#include <tuple>
#include <utility>

#include "backends/c10d/ccl_backend.h"
#include "backends/c10d/shm_backend.h"
#include "backends/c10d/spanning_backend.h"
#include "backends/c10d/transport.h"
#include "backends/ccl/library.h"
#include "backends/shm/rendezvous.h"
#include "bind/gil.h"

namespace cpudist::backends {

namespace {

namespace py = pybind11;

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

class StoreBoard : public shm::Board {
 public:
  StoreBoard(StorePtr store, Milliseconds timeout) : store_(std::move(store)), timeout_(timeout) {}
  void put(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key) override {
    store_->wait({key}, timeout_);
    const std::vector<uint8_t> value = store_->get(key);
    return {value.begin(), value.end()};
  }

 private:
  StorePtr store_;
  Milliseconds timeout_;
};

shm::Host meet(const StorePtr& store, int rank, int size, Milliseconds timeout,
               const std::string& host) {
  StoreBoard board(store, timeout);
  return shm::meet(board, rank, size, host.empty() ? shm::host_identity() : host);
}

c10::intrusive_ptr<ShmBackend> local_backend(const shm::Host& host, int rank, Milliseconds timeout,
                                             const std::vector<int>& global_ranks) {
  std::vector<int> names;
  int local = 0;
  for (const int member : host.members) {
    if (member == rank) local = static_cast<int>(names.size());
    names.push_back(global_ranks.empty() ? member : global_ranks.at(static_cast<size_t>(member)));
  }
  const int size = static_cast<int>(names.size());
  auto group = std::make_shared<shm::Group>(host.segment, local, std::move(names), timeout);
  return c10::make_intrusive<ShmBackend>(std::move(group), local, size, timeout);
}

BackendPtr create_shm(const shm::Host& host, int rank, Milliseconds timeout,
                      const std::vector<int>& global_ranks) {
  return local_backend(host, rank, timeout, global_ranks);
}

BackendPtr create_spanning(const shm::Host& host, int rank, int size, Milliseconds timeout,
                           const std::vector<int>& global_ranks, const StorePtr& store,
                           const BackendPtr& between, const BackendPtr& everyone) {
  return c10::make_intrusive<SpanningBackend>(rank, size, timeout, store, host,
                                              local_backend(host, rank, timeout, global_ranks),
                                              between, everyone);
}

at::Tensor shm_empty(const BackendPtr& backend, int64_t numel, at::ScalarType dtype) {
  if (auto* one = dynamic_cast<ShmBackend*>(backend.get())) return one->empty(numel, dtype);
  if (auto* one = dynamic_cast<SpanningBackend*>(backend.get())) return one->empty(numel, dtype);
  throw Error(ErrorCode::kInvalidArgument,
              "backend shm: expected a group of this backend, found " + backend->getBackendName());
}

std::vector<std::vector<int>> shm_hosts(const BackendPtr& backend) {
  if (auto* one = dynamic_cast<SpanningBackend*>(backend.get())) return one->hosts();
  std::vector<int> all(static_cast<size_t>(backend->getSize()));
  std::iota(all.begin(), all.end(), 0);
  return {all};
}

// c10d's store, which has a key or waits for it, as one that is asked.
class StoreOfGroup final : public ccl::MemberStore {
 public:
  explicit StoreOfGroup(StorePtr store) : store_(std::move(store)) {}

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

  StorePtr store_;
};

using PeerOf = std::tuple<int, int64_t, uint64_t>;

BackendPtr create_ccl(std::shared_ptr<ccl::Engine> engine, const StorePtr& store, int rank,
                      int size, int id, int64_t timeout_ms, const std::vector<PeerOf>& peers,
                      bool checks) {
  ccl::GroupOptions options;
  options.rank = rank;
  options.size = size;
  options.id = id;
  options.timeout = std::chrono::milliseconds(timeout_ms);
  options.store = std::make_unique<StoreOfGroup>(store);
  for (const auto& [peer, pid, started] : peers) {
    options.peers.push_back(ccl::Peer{peer, pid, started});
  }
  return c10::make_intrusive<CclBackend>(std::move(engine), std::move(options), checks);
}

void bind_shm(py::module_& module) {
  module.attr("TORCH_VERSION") = TORCH_VERSION;
  py::class_<shm::Host>(module, "Host")
      .def_readonly("members", &shm::Host::members)
      .def_readonly("leaders", &shm::Host::leaders)
      .def_readonly("leader", &shm::Host::leader);
  const py::call_guard<bind::GilReleased> unlocked;
  module.def("meet", &meet, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::arg("host"), unlocked);
  module.def("create_shm", &create_shm, py::arg("host"), py::arg("rank"), py::arg("timeout"),
             py::arg("global_ranks"), unlocked);
  module.def("create_spanning", &create_spanning, py::arg("host"), py::arg("rank"), py::arg("size"),
             py::arg("timeout"), py::arg("global_ranks"), py::arg("store"), py::arg("between"),
             py::arg("everyone"), unlocked);
  module.def("shm_empty", &shm_empty, py::arg("backend"), py::arg("numel"), py::arg("dtype"),
             unlocked);
  module.def("shm_hosts", &shm_hosts, py::arg("backend"));
}

void bind_ccl(py::module_& module) {
  using Released = py::call_guard<bind::GilReleased>;
  py::class_<ccl::Engine, std::shared_ptr<ccl::Engine>>(module, "CclEngine")
      .def(py::init([](const std::string& library) {
             return std::make_shared<ccl::Engine>(ccl::load(library));
           }),
           py::arg("library"), Released())
      .def_property_readonly("release",
                             [](const ccl::Engine& engine) { return engine.calls().release(); })
      .def("stop", &ccl::Engine::stop, Released());
  module.def("create_ccl", &create_ccl, py::kw_only(), py::arg("engine"), py::arg("store"),
             py::arg("rank"), py::arg("size"), py::arg("id"), py::arg("timeout_ms"),
             py::arg("peers"), py::arg("checks"), Released());
}

}  // namespace

}  // namespace cpudist::backends

PYBIND11_MODULE(_c10d, module) {
  module.doc() = "Backends of torch.distributed; see _c10d.pyi.";
  cpudist::bind::keep_unwound_threads();
  cpudist::backends::bind_shm(module);
  cpudist::backends::bind_ccl(module);
  cpudist::backends::bind_transport(module);
}
