// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Methods of the class Client for trainers that step by themselves and exchange deltas.
#include <pybind11/stl.h>

#include "bind/client_holder.h"

namespace cpudist::bind {

namespace {

using kernels::OptimizerConfig;

using RowsArgument = std::tuple<Address, Address, Address>;  // weight, state, counts

void update_rows(ClientHolder& self, uint32_t param_set, const TableArgument& gradient,
                 const RowsArgument& rows, const OptimizerConfig& config, int64_t step) {
  const auto& [table, keys, count, values] = gradient;
  const auto& [weight, state, counts] = rows;
  self.get().update_rows(param_set,
                         {table, at<const int64_t>(keys), count, at<const float>(values)},
                         {at<float>(weight), at<float>(state), at<uint32_t>(counts)}, config, step);
}

py::dict exchange_stats(const ClientHolder& self, uint32_t param_set) {
  const client::ExchangeStats stats = self.get().exchange_stats(param_set);
  py::dict result;
  result["exchanges"] = stats.exchanges;
  result["rows_sent"] = stats.rows_sent;
  result["rows_received"] = stats.rows_received;
  result["shadow_rows"] = stats.shadow_rows;
  result["memory_bytes"] = stats.memory_bytes;
  result["busy_s"] = stats.busy_s;
  return result;
}

}  // namespace

void bind_exchange(ClientClass& client) {
  client
      .def(
          "start_exchange",
          [](ClientHolder& self, uint32_t param_set, bool alone, uint64_t memory_cap_bytes) {
            self.get().start_exchange(param_set, alone, memory_cap_bytes);
          },
          py::arg("param_set"), py::kw_only(), py::arg("alone"), py::arg("memory_cap_bytes"),
          NoGil())
      .def(
          "reset_exchange",
          [](ClientHolder& self, uint32_t param_set, const std::vector<Address>& weights) {
            self.get().reset_exchange(param_set, pointers(weights));
          },
          py::arg("param_set"), py::arg("weights"), NoGil())
      .def(
          "undo_movement",
          [](ClientHolder& self, uint32_t param_set, const std::vector<Address>& weights,
             const std::vector<uint32_t>& parameters, const std::vector<uint32_t>& tables) {
            self.get().undo_movement(param_set, pointers(weights), parameters, tables);
          },
          py::arg("param_set"), py::arg("weights"), py::kw_only(), py::arg("parameters"),
          py::arg("tables"), NoGil())
      .def("update_rows", &update_rows, py::arg("param_set"), py::kw_only(), py::arg("gradient"),
           py::arg("rows"), py::arg("config"), py::arg("step"), NoGil())
      .def(
          "begin_exchange",
          [](ClientHolder& self, uint32_t param_set, bool whole, bool averages, uint64_t steps,
             uint64_t samples) {
            self.get().begin_exchange(param_set, whole, averages, steps, samples);
          },
          py::arg("param_set"), py::kw_only(), py::arg("whole"), py::arg("averages"),
          py::arg("steps"), py::arg("samples"), NoGil())
      .def(
          "advance_exchange",
          [](ClientHolder& self, uint32_t param_set, const std::vector<Address>& weights,
             double budget_s) {
            return self.get().advance_exchange(param_set, pointers(weights), budget_s);
          },
          py::arg("param_set"), py::arg("weights"), py::arg("budget_s"), NoGil())
      .def(
          "finish_exchange",
          [](ClientHolder& self, uint32_t param_set, const std::vector<Address>& weights) {
            self.get().finish_exchange(param_set, pointers(weights));
          },
          py::arg("param_set"), py::arg("weights"), NoGil())
      .def(
          "exchange_has_more",
          [](ClientHolder& self, uint32_t param_set) {
            return self.get().exchange_has_more(param_set);
          },
          py::arg("param_set"))
      .def(
          "exchange_steps",
          [](ClientHolder& self, uint32_t param_set) {
            return self.get().exchange_steps(param_set);
          },
          py::arg("param_set"))
      .def("exchange_stats", &exchange_stats, py::arg("param_set"));
}

}  // namespace cpudist::bind
