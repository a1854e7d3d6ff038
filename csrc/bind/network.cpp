// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The in-process network and its faults, and the network of ranks over a collective backend.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "base/errors.h"
#include "bind/bind.h"
#include "bind/holders.h"
#include "transport/inproc/channel.h"
#include "transport/ranks/channel.h"

namespace cpudist::bind {

namespace {

std::unique_ptr<RankNetworkHolder> make_rank_network(const py::capsule& transport,
                                                     const std::vector<uint32_t>& peers) {
  const char* name = PyCapsule_GetName(transport.ptr());
  if (name == nullptr || std::string_view(name) != transport::kRankTransportCapsule) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string("expected a transport of the kind ") +
                    transport::kRankTransportCapsule + ", found " +
                    (name == nullptr ? "a capsule without a name" : name) +
                    ": build the modules _core and _c10d together");
  }
  auto shared = *static_cast<std::shared_ptr<transport::RankTransport>*>(
      PyCapsule_GetPointer(transport.ptr(), name));
  const GilReleased no_gil;
  return std::make_unique<RankNetworkHolder>(
      transport::RankNetwork::create(std::move(shared), peers));
}

}  // namespace

void bind_network(py::module_& module) {
  using transport::FaultCounts;
  using transport::FaultPlan;
  py::class_<transport::FaultPlan>(module, "FaultPlan")
      .def(py::init([](double drop, double duplicate, double reorder, double delay,
                       uint64_t delay_ms_max, double cut, uint64_t seed) {
             return transport::FaultPlan{drop, duplicate, reorder, delay, delay_ms_max, cut, seed};
           }),
           py::kw_only(), py::arg("drop") = 0.0, py::arg("duplicate") = 0.0,
           py::arg("reorder") = 0.0, py::arg("delay") = 0.0, py::arg("delay_ms_max") = 0,
           py::arg("cut") = 0.0, py::arg("seed") = 0)
      .def_readwrite("drop", &transport::FaultPlan::drop)
      .def_readwrite("duplicate", &transport::FaultPlan::duplicate)
      .def_readwrite("reorder", &transport::FaultPlan::reorder)
      .def_readwrite("delay", &transport::FaultPlan::delay)
      .def_readwrite("delay_ms_max", &transport::FaultPlan::delay_ms_max)
      .def_readwrite("cut", &transport::FaultPlan::cut)
      .def_readwrite("seed", &transport::FaultPlan::seed);
  py::class_<transport::FaultCounts>(module, "FaultCounts")
      .def_readonly("delivered", &transport::FaultCounts::delivered)
      .def_readonly("dropped", &transport::FaultCounts::dropped)
      .def_readonly("duplicated", &transport::FaultCounts::duplicated)
      .def_readonly("reordered", &transport::FaultCounts::reordered)
      .def_readonly("delayed", &transport::FaultCounts::delayed)
      .def_readonly("cut", &transport::FaultCounts::cut);
  py::class_<NetworkHolder, std::shared_ptr<NetworkHolder>>(module, "InprocNetwork")
      .def(py::init([](const std::optional<transport::FaultPlan>& plan) {
             return std::make_shared<NetworkHolder>(plan.value_or(transport::FaultPlan{}));
           }),
           py::arg("plan") = py::none())
      .def("counts", [](const NetworkHolder& self) { return self.get()->counts(); });
  py::class_<RankNetworkHolder, std::shared_ptr<RankNetworkHolder>>(module, "RankNetwork")
      .def(py::init(&make_rank_network), py::arg("transport"), py::arg("peers"))
      .def(
          "stop", [](RankNetworkHolder& self) { self.get()->stop(); },
          py::call_guard<GilReleased>());
}

}  // namespace cpudist::bind
