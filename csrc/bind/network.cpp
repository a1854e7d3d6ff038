// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The in-process network and its faults.
#include <memory>
#include <optional>

#include <pybind11/stl.h>

#include "bind/bind.h"
#include "bind/holders.h"
#include "core/inproc_channel.h"

namespace cpudist::bind {

void bind_network(py::module_& module) {
  using core::FaultCounts;
  using core::FaultPlan;
  py::class_<FaultPlan>(module, "FaultPlan")
      .def(py::init([](double drop, double duplicate, double reorder, double delay,
                       uint64_t delay_ms_max, double cut, uint64_t seed) {
             return FaultPlan{drop, duplicate, reorder, delay, delay_ms_max, cut, seed};
           }),
           py::kw_only(), py::arg("drop") = 0.0, py::arg("duplicate") = 0.0,
           py::arg("reorder") = 0.0, py::arg("delay") = 0.0, py::arg("delay_ms_max") = 0,
           py::arg("cut") = 0.0, py::arg("seed") = 0)
      .def_readwrite("drop", &FaultPlan::drop)
      .def_readwrite("duplicate", &FaultPlan::duplicate)
      .def_readwrite("reorder", &FaultPlan::reorder)
      .def_readwrite("delay", &FaultPlan::delay)
      .def_readwrite("delay_ms_max", &FaultPlan::delay_ms_max)
      .def_readwrite("cut", &FaultPlan::cut)
      .def_readwrite("seed", &FaultPlan::seed);
  py::class_<FaultCounts>(module, "FaultCounts")
      .def_readonly("delivered", &FaultCounts::delivered)
      .def_readonly("dropped", &FaultCounts::dropped)
      .def_readonly("duplicated", &FaultCounts::duplicated)
      .def_readonly("reordered", &FaultCounts::reordered)
      .def_readonly("delayed", &FaultCounts::delayed)
      .def_readonly("cut", &FaultCounts::cut);
  py::class_<NetworkHolder, std::shared_ptr<NetworkHolder>>(module, "InprocNetwork")
      .def(py::init([](const std::optional<FaultPlan>& plan) {
             return std::make_shared<NetworkHolder>(plan.value_or(FaultPlan{}));
           }),
           py::arg("plan") = py::none())
      .def("counts", [](const NetworkHolder& self) { return self.get()->counts(); });
}

}  // namespace cpudist::bind
