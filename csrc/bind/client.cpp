// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The classes Client and ParamSet. Memory comes as addresses; every call that may wait releases the
// GIL.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/client_holder.h"
#include "client/client.h"

namespace cpudist::bind {

namespace {

using client::Client;
using client::ParamSet;
using kernels::OptimizerConfig;

void join_with(const ParamSetHolder& self, const ParamSetHolder& last) {
  self.get().join_with(last.get());
}

void bind_table(const ParamSetHolder& self, uint32_t table, Address weight) {
  self.get().bind_table(table, at<float>(weight));
}

void store_run(const ParamSetHolder& self, uint32_t table, uint64_t begin, uint64_t end,
               Address weights, Address state, Address counts, uint64_t step) {
  self.get().store_run({table, begin, end, at<const float>(weights), at<const float>(state),
                        at<const uint32_t>(counts)},
                       step);
}

uint64_t fetch_run(const ParamSetHolder& self, uint32_t table, uint64_t begin, uint64_t end,
                   Address weights, Address state, Address counts) {
  uint64_t step = 0;
  self.get().fetch_run(
      {table, begin, end, at<float>(weights), at<float>(state), at<uint32_t>(counts)}, &step);
  return step;
}

void store_parameter(const ParamSetHolder& self, uint32_t parameter, Address weights, Address state,
                     uint64_t step, Address average) {
  self.get().store_parameter(parameter, at<const void>(weights), at<const void>(state), step,
                             at<const void>(average));
}

uint64_t fetch_parameter(const ParamSetHolder& self, uint32_t parameter, Address weights,
                         Address state) {
  uint64_t step = 0;
  self.get().fetch_parameter(parameter, at<void>(weights), at<void>(state), &step);
  return step;
}

uint64_t pull(const ParamSetHolder& self, uint32_t table, Address ids, uint64_t count,
              bool ids_are_int32) {
  return self.get().pull(table, at<const void>(ids), count, ids_are_int32);
}

// (table, address of the first id, number of its IdType, sizes, strides)
using GuessArgument =
    std::tuple<uint32_t, Address, uint8_t, std::vector<int64_t>, std::vector<int64_t>>;

std::vector<uint64_t> pull_together(const ParamSetHolder& self,
                                    const std::vector<GuessArgument>& guesses) {
  std::vector<client::GuessedIds> made;
  for (const auto& [table, first, type, sizes, strides] : guesses) {
    if (sizes.size() != strides.size()) {
      throw Error(ErrorCode::kInvalidArgument, "pull_together: expected a stride per size, found " +
                                                   std::to_string(strides.size()) + " for " +
                                                   std::to_string(sizes.size()));
    }
    made.push_back(
        {table, at<const void>(first), static_cast<client::IdType>(type), sizes, strides});
  }
  return self.get().pull_together(made);
}

uint64_t lookup(const ParamSetHolder& self, uint32_t table, Address ids, uint64_t count,
                bool ids_are_int32, Address out, bool keep) {
  return self.get().lookup(table, at<const void>(ids), count, ids_are_int32, at<float>(out), keep);
}

void read_rows(const ParamSetHolder& self, uint32_t table, Address keys, uint64_t count) {
  self.get().read_rows(table, {at<const int64_t>(keys), static_cast<size_t>(count)});
}

void pull_dense(const ParamSetHolder& self, const std::vector<Address>& weights) {
  self.get().pull_dense(pointers(weights));
}

uint64_t push(const ParamSetHolder& self, std::vector<OptimizerConfig> configs,
              const std::vector<ParameterArgument>& parameters,
              const std::vector<TableArgument>& tables, const std::vector<Address>& weights,
              double weight, uint64_t samples, bool by_samples, double clip_value, double clip_norm,
              bool clip_each) {
  client::StepPush step = make_step(std::move(configs), parameters, tables, weights);
  step.weight = weight;
  step.samples = samples;
  step.by_samples = by_samples;
  step.clip_value = clip_value;
  step.clip_norm = clip_norm;
  step.clip_each = clip_each;
  return self.get().push(step);
}

uint64_t push_early(const ParamSetHolder& self, const std::vector<ParameterArgument>& parameters) {
  std::vector<client::ParameterGradient> gradients;
  for (const auto& [parameter, address] : parameters) {
    gradients.push_back({parameter, at<const void>(address)});
  }
  return self.get().push_early(gradients);
}

// (table, address of the ids, count, whether they are int32)
using ComingArgument = std::tuple<uint32_t, Address, uint64_t, bool>;

uint64_t prefetch(const ParamSetHolder& self, const std::vector<ComingArgument>& ids,
                  bool managed) {
  std::vector<client::ComingIds> coming;
  for (const auto& [table, address, count, are_int32] : ids) {
    coming.push_back({table, at<const void>(address), count, are_int32});
  }
  return self.get().prefetch(coming, managed);
}

// {"0": n, "1": n, "2-3": n, ...} up to the last bucket that has something.
py::dict histogram(const std::array<uint64_t, client::StalenessStats::kBuckets>& counts) {
  py::dict result;
  size_t last = counts.size();
  while (last > 0 && counts[last - 1] == 0) --last;
  for (size_t i = 0; i < last; ++i) {
    const uint64_t low = i == 0 ? 0 : uint64_t{1} << (i - 1);
    const uint64_t high = i == 0 ? 0 : low + (low - 1);
    const std::string name =
        low == high ? std::to_string(low) : std::to_string(low) + "-" + std::to_string(high);
    result[py::str(name)] = counts[i];
  }
  return result;
}

py::dict staleness(const client::StalenessStats& stats) {
  const double pushes = stats.pushes == 0 ? 1.0 : static_cast<double>(stats.pushes);
  py::dict result;
  result["pushes"] = stats.pushes;
  result["merged"] = stats.merged;
  result["overloaded"] = stats.overloaded;
  result["steps"] = histogram(stats.steps);
  result["steps_max"] = stats.steps_max;
  result["steps_mean"] = static_cast<double>(stats.steps_sum) / pushes;
  result["samples"] = histogram(stats.samples);
  result["samples_max"] = stats.samples_max;
  result["samples_mean"] = static_cast<double>(stats.samples_sum) / pushes;
  return result;
}

py::dict stats(const ClientHolder& self) {
  client::ClientStats stats;
  {
    const GilReleased release;
    stats = self.get().stats();
  }
  py::dict result;
  result["bytes_sent"] = stats.bytes_sent;
  result["bytes_received"] = stats.bytes_received;
  result["requests"] = stats.requests;
  result["resent"] = stats.resent;
  result["reconnects"] = stats.reconnects;
  result["rows_pulled"] = stats.rows_pulled;
  result["rows_pushed"] = stats.rows_pushed;
  result["rows_prefetched"] = stats.rows_prefetched;
  result["prefetch_hits"] = stats.prefetch_hits;
  result["prefetch_refreshed"] = stats.prefetch_refreshed;
  result["early_bytes"] = stats.early_bytes;
  result["early_changed_bytes"] = stats.early_changed_bytes;
  result["cache_dropped"] = stats.cache_dropped;
  result["residues_dropped"] = stats.residues_dropped;
  result["queued"] = stats.queued;
  result["wait_s"] = stats.wait_s;
  result["round_wait_s"] = stats.round_wait_s;
  result["staleness"] = staleness(stats.staleness);
  return result;
}

py::list table_traffic(const ClientHolder& self) {
  std::vector<client::TableTraffic> tables;
  {
    const GilReleased release;
    tables = self.get().table_traffic();
  }
  py::list result;
  for (const client::TableTraffic& table : tables) {
    py::dict one;
    one["param_set"] = table.param_set;
    one["name"] = table.name;
    one["bytes_sent"] = table.bytes_sent;
    one["bytes_received"] = table.bytes_received;
    result.append(std::move(one));
  }
  return result;
}

// Asked several times a step, for which a dict of all counters would be too much.
double waited_s(const ClientHolder& self) {
  const GilReleased release;
  return self.get().stats().wait_s;
}

std::unique_ptr<ClientHolder> make_client(
    uint64_t run_id, uint32_t trainer_rank, uint32_t trainer_count,
    std::vector<std::vector<std::string>> servers, const std::shared_ptr<NetworkHolder>& network,
    const std::shared_ptr<RankNetworkHolder>& ranks, uint32_t incarnation, uint64_t liveness_ms,
    uint64_t reconnect_grace_ms, uint64_t connect_deadline_ms, uint64_t rpc_deadline_ms,
    uint32_t rpc_retries, uint64_t round_deadline_ms, uint64_t probe_ms, uint64_t resend_ms,
    uint64_t straggler_log_ms, std::string host, py::object logger, const Secret* secret) {
  client::ClientOptions options;
  options.run_id = run_id;
  options.trainer_rank = trainer_rank;
  options.trainer_count = trainer_count;
  options.servers = std::move(servers);
  options.incarnation = incarnation;
  options.liveness_ms = liveness_ms;
  options.reconnect_grace_ms = reconnect_grace_ms;
  options.connect_deadline_ms = connect_deadline_ms;
  options.rpc_deadline_ms = rpc_deadline_ms;
  options.rpc_retries = rpc_retries;
  options.round_deadline_ms = round_deadline_ms;
  options.probe_ms = probe_ms;
  options.resend_ms = resend_ms;
  options.straggler_log_ms = straggler_log_ms;
  options.host = std::move(host);
  return std::make_unique<ClientHolder>(std::move(options), network, ranks, std::move(logger),
                                        secret);
}

void bind_constructor(py::class_<ClientHolder>& client) {
  const client::ClientOptions defaults;
  client.def(py::init(&make_client), py::kw_only(), py::arg("run_id"), py::arg("trainer_rank") = 0,
             py::arg("trainer_count") = 1, py::arg("servers"), py::arg("network") = py::none(),
             py::arg("ranks") = py::none(), py::arg("incarnation") = defaults.incarnation,
             py::arg("liveness_ms") = defaults.liveness_ms,
             py::arg("reconnect_grace_ms") = defaults.reconnect_grace_ms,
             py::arg("connect_deadline_ms") = defaults.connect_deadline_ms,
             py::arg("rpc_deadline_ms") = defaults.rpc_deadline_ms,
             py::arg("rpc_retries") = defaults.rpc_retries,
             py::arg("round_deadline_ms") = defaults.round_deadline_ms,
             py::arg("probe_ms") = defaults.probe_ms, py::arg("resend_ms") = defaults.resend_ms,
             py::arg("straggler_log_ms") = defaults.straggler_log_ms, py::arg("host") = "",
             py::arg("logger") = py::none(), py::arg("secret") = py::none());
}

std::unique_ptr<ParamSetHolder> open(const ClientHolder& self, const wire::ParamSetLayout& layout,
                                     uint64_t cache_bytes, uint64_t residue_bytes) {
  return std::make_unique<ParamSetHolder>(self.get().open(layout, {cache_bytes, residue_bytes}));
}

template <typename Call>
auto of_client(Call call) {
  return method<ClientHolder>(call);
}

template <typename Call>
auto of_set(Call call) {
  return method<ParamSetHolder>(call);
}

void bind_calls(py::class_<ClientHolder>& client) {
  client.def("connect", of_client(&Client::connect), NoGil())
      .def("open", &open, py::arg("layout"), py::kw_only(),
           py::arg("cache_bytes") = client::CacheLimits::kCacheBytes,
           py::arg("residue_bytes") = client::CacheLimits::kResidueBytes, NoGil(),
           py::keep_alive<0, 1>())
      .def("barrier", of_client(&Client::barrier), NoGil())
      .def("goodbye", of_client(&Client::goodbye), NoGil())
      .def("check", of_client(&Client::check), NoGil())
      .def("counted_lost", of_client(&Client::counted_lost), NoGil())
      .def("out_of_reach", of_client(&Client::out_of_reach), NoGil())
      .def("server_ended", of_client(&Client::server_ended), NoGil())
      .def("carried_out_before", of_client(&Client::carried_out_before), NoGil())
      .def("abort", of_client(&Client::abort), py::arg("reason"), NoGil())
      .def("fenced_by", of_client(&Client::fenced_by))
      .def("waited_s", &waited_s)
      .def("table_traffic", &table_traffic)
      .def("stats", &stats);
}

void bind_values(ParamSetClass& set) {
  set.def_property_readonly("id", of_set(&ParamSet::id))
      .def("bind_table", &bind_table, py::arg("table"), py::arg("weight"), NoGil())
      .def("store_parameter", &store_parameter, py::arg("index"), py::arg("weights"),
           py::arg("state") = 0, py::arg("step") = 0, py::arg("average") = 0, NoGil())
      .def("store_run", &store_run, py::arg("table"), py::arg("begin"), py::arg("end"),
           py::arg("weights"), py::arg("state") = 0, py::arg("counts") = 0, py::arg("step") = 0,
           NoGil())
      .def("fetch_run", &fetch_run, py::arg("table"), py::arg("begin"), py::arg("end"),
           py::arg("weights"), py::arg("state") = 0, py::arg("counts") = 0, NoGil())
      .def("fetch_parameter", &fetch_parameter, py::arg("index"), py::arg("weights"),
           py::arg("state") = 0, NoGil())
      .def("pull", &pull, py::arg("table"), py::arg("ids"), py::arg("count"),
           py::arg("ids_are_int32") = false, NoGil())
      .def("lookup", &lookup, py::arg("table"), py::arg("ids"), py::arg("count"),
           py::arg("ids_are_int32"), py::arg("out"), py::arg("keep"), NoGil())
      .def("pull_together", &pull_together, py::arg("guesses"), NoGil())
      .def("read_rows", &read_rows, py::arg("table"), py::arg("keys"), py::arg("count"), NoGil())
      .def("prefetch", &prefetch, py::arg("ids"), py::arg("managed") = false, NoGil())
      .def("use_prefetched", of_set(&ParamSet::use_prefetched), py::arg("number"), NoGil())
      .def("drop_prefetched", of_set(&ParamSet::drop_prefetched), NoGil())
      .def("pull_all_rows", of_set(&ParamSet::pull_all_rows), NoGil())
      .def("pull_dense", &pull_dense, py::arg("weights"), NoGil())
      .def("read_averages", of_set(&ParamSet::read_averages), py::arg("averages"), NoGil());
}

void bind_steps(ParamSetClass& set) {
  set.def("push", &push, py::kw_only(), py::arg("configs"),
          py::arg("parameters") = std::vector<ParameterArgument>(),
          py::arg("tables") = std::vector<TableArgument>(),
          py::arg("weights") = std::vector<Address>(), py::arg("weight") = 1.0,
          py::arg("samples") = 0, py::arg("by_samples") = false, py::arg("clip_value") = 0.0,
          py::arg("clip_norm") = 0.0, py::arg("clip_each") = false, NoGil())
      .def("push_early", &push_early, py::arg("parameters"), NoGil())
      .def("may_push_early", of_set(&ParamSet::may_push_early), NoGil())
      .def("early_bytes", of_set(&ParamSet::early_bytes))
      .def("drain", of_set(&ParamSet::drain), NoGil());
}

void bind_membership(ParamSetClass& set) {
  set.def("ready", of_set(&ParamSet::ready), NoGil())
      .def("holds_values", of_set(&ParamSet::holds_values), NoGil())
      .def("leave", of_set(&ParamSet::leave), NoGil())
      .def("join", of_set(&ParamSet::join), NoGil())
      .def("join_with", &join_with, py::arg("last"), NoGil())
      .def("is_member", of_set(&ParamSet::is_member), NoGil())
      .def("forget_weights", of_set(&ParamSet::forget_weights), NoGil())
      .def("close", of_set(&ParamSet::close), NoGil());
}

}  // namespace

void bind_client(py::module_& module) {
  ParamSetClass set(module, "ParamSet");
  bind_values(set);
  bind_steps(set);
  bind_membership(set);
  bind_cuts(set);
  bind_pushes(module, set);
  bind_exchange(module, set);
  bind_loads(set);
  py::class_<ClientHolder> client(module, "Client");
  bind_constructor(client);
  bind_calls(client);
  module.def("listen_to_waits", &listen_to_waits, py::arg("told"));
}

}  // namespace cpudist::bind
