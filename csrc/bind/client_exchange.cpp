// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The class GeoExchange, of trainers that step by themselves and exchange deltas.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "bind/client_holder.h"
#include "client/geo/exchange.h"
#include "table/store.h"

namespace cpudist::bind {

namespace {

using client::GeoExchange;
using kernels::OptimizerConfig;
using ExchangeHolder = PartHolder<GeoExchange>;

using RowsArgument = std::tuple<Address, Address, Address>;  // weight, state, counts

// What a server's cap leaves to pushes beside the values of this set; 0: there is no cap.
uint64_t push_cap_bytes(const ParamSetHolder& self, uint64_t memory_cap_bytes) {
  if (memory_cap_bytes == 0) return 0;
  const auto set = self.share()->state();
  uint64_t most = 0;
  for (uint32_t s = 0; s < set->server_count; ++s) {
    const auto store = table::make_store(set->layout, s, set->server_count, nullptr, nullptr);
    most = std::max(most, planned_bytes(store));
  }
  // Servers that keep more have refused the set.
  return memory_cap_bytes - std::min(most, memory_cap_bytes - 1);
}

std::unique_ptr<ExchangeHolder> start_exchange(const ParamSetHolder& self, bool alone,
                                               uint64_t memory_cap_bytes,
                                               std::vector<OptimizerConfig> rules,
                                               uint64_t cache_bytes) {
  client::ExchangeOptions options;
  options.alone = alone;
  options.push_cap_bytes = push_cap_bytes(self, memory_cap_bytes);
  options.cache_bytes = cache_bytes;
  options.rules = std::move(rules);
  return std::make_unique<ExchangeHolder>(
      std::make_shared<GeoExchange>(self.share(), std::move(options)));
}

void reset_exchange(const ExchangeHolder& self, const std::vector<Address>& weights) {
  self.get().reset(pointers(weights));
}

void undo_movement(const ExchangeHolder& self, const std::vector<Address>& weights,
                   const std::vector<uint32_t>& parameters, const std::vector<uint32_t>& tables) {
  self.get().undo(pointers(weights), parameters, tables);
}

void update_rows(const ExchangeHolder& self, const TableArgument& gradient,
                 const RowsArgument& rows, const OptimizerConfig& config, int64_t step) {
  const auto& [table, keys, count, values] = gradient;
  const auto& [weight, state, counts] = rows;
  self.get().update_rows({table, at<const int64_t>(keys), count, at<const float>(values)},
                         {at<float>(weight), at<float>(state), at<uint32_t>(counts)}, config, step);
}

using SlotsArgument = std::tuple<Address, Address, Address>;  // keys, counts, state

client::SlotArrays slot_arrays(const SlotsArgument& slots) {
  const auto& [keys, counts, state] = slots;
  return {at<int64_t>(keys), at<uint32_t>(counts), at<float>(state)};
}

void read_slots(const ExchangeHolder& self, uint32_t table, const SlotsArgument& slots) {
  self.get().read_slots(table, slot_arrays(slots));
}

void write_slots(const ExchangeHolder& self, uint32_t table, uint64_t rows,
                 const SlotsArgument& slots) {
  self.get().write_slots(table, rows, slot_arrays(slots));
}

using MovedArgument = std::tuple<Address, Address, Address, Address>;  // as MovedArrays

client::MovedArrays moved_arrays(const MovedArgument& rows) {
  const auto& [keys, values, agreed, touched] = rows;
  return {at<int64_t>(keys), at<float>(values), at<float>(agreed), at<uint8_t>(touched)};
}

void read_moved(const ExchangeHolder& self, uint32_t table, const MovedArgument& rows) {
  self.get().read_moved(table, moved_arrays(rows));
}

uint64_t write_moved(const ExchangeHolder& self, uint32_t table, uint64_t count,
                     const MovedArgument& rows) {
  return self.get().write_moved(table, count, moved_arrays(rows));
}

void read_agreed(const ExchangeHolder& self, const std::vector<Address>& to) {
  self.get().read_agreed(pointers(to));
}

void write_agreed(const ExchangeHolder& self, const std::vector<Address>& from) {
  self.get().write_agreed(pointers(from));
}

void begin_exchange(const ExchangeHolder& self, bool whole, const std::pair<double, double>& step,
                    uint64_t steps, uint64_t samples) {
  self.get().begin(whole, {step.first, step.second}, steps, samples);
}

bool advance_exchange(const ExchangeHolder& self, const std::vector<Address>& weights,
                      double budget_s) {
  return self.get().advance(pointers(weights), budget_s);
}

bool keep_pace(const ExchangeHolder& self, const std::vector<Address>& weights, uint64_t left,
               uint64_t interval) {
  return self.get().keep_pace(pointers(weights), left, interval);
}

void finish_exchange(const ExchangeHolder& self, const std::vector<Address>& weights) {
  self.get().finish(pointers(weights));
}

void mark_exchange(const ExchangeHolder& self, const std::vector<Address>& weights, uint64_t number,
                   const std::string& name, uint64_t wait_ms, uint64_t hold_ms) {
  self.get().mark_cut(pointers(weights), number, name, wait_ms, hold_ms);
}

std::optional<MarkAnswer> exchange_cut_answer(const ExchangeHolder& self) {
  const auto answer = self.get().cut_answer();
  if (!answer) return std::nullopt;
  return mark_answer(*answer);
}

py::dict exchange_stats(const ExchangeHolder& self) {
  const client::ExchangeStats stats = self.get().stats();
  py::dict result;
  result["exchanges"] = stats.exchanges;
  result["rows_sent"] = stats.rows_sent;
  result["rows_received"] = stats.rows_received;
  result["shadow_rows"] = stats.shadow_rows;
  result["memory_bytes"] = stats.memory_bytes;
  result["slot_rows"] = stats.slot_rows;
  result["slot_bytes"] = stats.slot_bytes;
  result["retired_rows"] = stats.retired_rows;
  result["busy_s"] = stats.busy_s;
  result["wait_s"] = stats.wait_s;
  return result;
}

}  // namespace

void bind_exchange(py::module_& module, ParamSetClass& set) {
  module.attr("ROOT_STEP") = client::kRootStep;
  py::class_<ExchangeHolder>(module, "GeoExchange")
      .def("reset", &reset_exchange, py::arg("weights"), NoGil())
      .def("undo", &undo_movement, py::arg("weights"), py::kw_only(), py::arg("parameters"),
           py::arg("tables"), NoGil())
      .def("update_rows", &update_rows, py::kw_only(), py::arg("gradient"), py::arg("rows"),
           py::arg("config"), py::arg("step"), NoGil())
      .def("forget_lookups", method<ExchangeHolder>(&GeoExchange::forget_lookups), NoGil())
      .def("refresh_slots", method<ExchangeHolder>(&GeoExchange::refresh_slots), NoGil())
      .def("store_slots", method<ExchangeHolder>(&GeoExchange::store_slots), NoGil())
      .def("keep_budget", method<ExchangeHolder>(&GeoExchange::keep_budget), NoGil())
      .def("slot_count", method<ExchangeHolder>(&GeoExchange::slot_count), NoGil())
      .def("read_slots", &read_slots, py::arg("table"), py::arg("slots"), NoGil())
      .def("write_slots", &write_slots, py::arg("table"), py::arg("rows"), py::arg("slots"),
           NoGil())
      .def("moved_count", method<ExchangeHolder>(&GeoExchange::moved_count), NoGil())
      .def("read_moved", &read_moved, py::arg("table"), py::arg("rows"), NoGil())
      .def("write_moved", &write_moved, py::arg("table"), py::arg("count"), py::arg("rows"),
           NoGil())
      .def("read_agreed", &read_agreed, py::arg("to"), NoGil())
      .def("write_agreed", &write_agreed, py::arg("values"), NoGil())
      .def("begin", &begin_exchange, py::kw_only(), py::arg("whole"), py::arg("step"),
           py::arg("steps"), py::arg("samples"), NoGil())
      .def("advance", &advance_exchange, py::arg("weights"), py::arg("budget_s"), NoGil())
      .def("keep_pace", &keep_pace, py::arg("weights"), py::kw_only(), py::arg("left"),
           py::arg("interval"), NoGil())
      .def("finish", &finish_exchange, py::arg("weights"), NoGil())
      .def("mark_cut", &mark_exchange, py::arg("weights"), py::arg("number"), py::arg("name"),
           py::arg("wait_ms"), py::arg("hold_ms") = 0, NoGil())
      .def("cut_answer", &exchange_cut_answer, NoGil())
      .def("has_more", method<ExchangeHolder>(&GeoExchange::has_more))
      .def("has_unsent", method<ExchangeHolder>(&GeoExchange::has_unsent))
      .def("steps", method<ExchangeHolder>(&GeoExchange::steps))
      .def("stats", &exchange_stats);
  set.def("start_exchange", &start_exchange, py::kw_only(), py::arg("alone"),
          py::arg("memory_cap_bytes"), py::arg("rules"), py::arg("cache_bytes"), NoGil(),
          py::keep_alive<0, 1>());
}

}  // namespace cpudist::bind
