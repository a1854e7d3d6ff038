// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The class AsyncPushes, of trainers whose pushes are applied as they come.
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "bind/client_holder.h"
#include "client/arrivals/pushes.h"

namespace cpudist::bind {

namespace {

using client::AsyncPushes;
using PushesHolder = PartHolder<AsyncPushes>;

std::unique_ptr<PushesHolder> start_queue(const ParamSetHolder& self, uint32_t size,
                                          uint32_t max_merge, const std::vector<bool>& mean,
                                          uint32_t pull_every) {
  const client::QueueOptions options{size, max_merge, mean, pull_every};
  return std::make_unique<PushesHolder>(std::make_shared<AsyncPushes>(self.share(), options));
}

uint64_t enqueue(const PushesHolder& self, std::vector<kernels::OptimizerConfig> configs,
                 const std::vector<ParameterArgument>& parameters,
                 const std::vector<TableArgument>& tables, const std::vector<Address>& weights,
                 uint64_t samples, double clip_value, double clip_norm, bool clip_each) {
  client::StepPush step = make_step(std::move(configs), parameters, tables, weights);
  step.samples = samples;
  step.clip_value = clip_value;
  step.clip_norm = clip_norm;
  step.clip_each = clip_each;
  return self.get().enqueue(step);
}

void queue_marker(const PushesHolder& self, uint64_t number, const std::string& name,
                  uint64_t wait_ms, uint64_t base, uint64_t hold_ms) {
  self.get().mark_cut(number, name, wait_ms, base, hold_ms);
}

std::optional<MarkAnswer> cut_answer(const PushesHolder& self) {
  const auto answer = self.get().cut_answer();
  if (!answer) return std::nullopt;
  return mark_answer(*answer);
}

std::tuple<uint64_t, uint64_t> end(const PushesHolder& self,
                                   const std::vector<uint64_t>& carried_out) {
  const client::Unapplied found = self.get().end(carried_out);
  return {found.steps, found.torn};
}

}  // namespace

void bind_pushes(py::module_& module, ParamSetClass& set) {
  py::class_<PushesHolder>(module, "AsyncPushes")
      .def("enqueue", &enqueue, py::kw_only(), py::arg("configs"),
           py::arg("parameters") = std::vector<ParameterArgument>(),
           py::arg("tables") = std::vector<TableArgument>(),
           py::arg("weights") = std::vector<Address>(), py::arg("samples") = 0,
           py::arg("clip_value") = 0.0, py::arg("clip_norm") = 0.0, py::arg("clip_each") = false,
           NoGil())
      .def("added", method<PushesHolder>(&AsyncPushes::added))
      .def("end", &end, py::arg("carried_out"), NoGil())
      .def("known_steps", method<PushesHolder>(&AsyncPushes::known_steps))
      .def("mark_cut", &queue_marker, py::arg("number"), py::arg("name"), py::arg("wait_ms"),
           py::arg("base") = 0, py::arg("hold_ms") = 0, NoGil())
      .def("cut_answer", &cut_answer, NoGil());
  set.def("start_queue", &start_queue, py::kw_only(), py::arg("size"), py::arg("max_merge"),
          py::arg("mean"), py::arg("pull_every"), NoGil(), py::keep_alive<0, 1>());
}

}  // namespace cpudist::bind
