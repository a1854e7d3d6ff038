// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Optimizer configurations and the layout of a parameter set.
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "bind/bind.h"
#include "bind/gil.h"
#include "kernels/initial.h"
#include "kernels/optimizers.h"
#include "wire/layout.h"

namespace cpudist::bind {

namespace {

using kernels::OptimizerConfig;
using kernels::OptimizerKind;
using wire::BlockSpec;
using wire::ParamSetLayout;
using wire::TableSpec;

constexpr std::array<std::pair<const char*, double OptimizerConfig::*>,
                     kernels::kOptimizerHyperCount>
    kHyper{{
        {"lr", &OptimizerConfig::lr},
        {"momentum", &OptimizerConfig::momentum},
        {"dampening", &OptimizerConfig::dampening},
        {"weight_decay", &OptimizerConfig::weight_decay},
        {"beta1", &OptimizerConfig::beta1},
        {"beta2", &OptimizerConfig::beta2},
        {"eps", &OptimizerConfig::eps},
        {"alpha", &OptimizerConfig::alpha},
        {"lr_decay", &OptimizerConfig::lr_decay},
        {"initial_accumulator", &OptimizerConfig::initial_accumulator},
        {"l1", &OptimizerConfig::l1},
        {"l2", &OptimizerConfig::l2},
        {"lr_power", &OptimizerConfig::lr_power},
    }};

OptimizerKind kind_from(const std::string& name) {
  std::string known;
  for (uint32_t i = 0; i < kernels::kOptimizerKindCount; ++i) {
    const auto kind = static_cast<OptimizerKind>(i);
    const std::string kind_name = kernels::optimizer_kind_name(kind);
    if (name == kind_name) return kind;
    known += known.empty() ? kind_name : ", " + kind_name;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "OptimizerConfig: unknown kind '" + name + "', expected one of " + known);
}

std::string kind_name(const OptimizerConfig& config) {
  return kernels::optimizer_kind_name(config.kind);
}

OptimizerConfig make_config(const std::string& kind, bool nesterov, const py::kwargs& options) {
  OptimizerConfig config;
  config.kind = kind_from(kind);
  config.flags = nesterov ? kernels::kOptimizerNesterov : 0;
  if (!options.contains("lr")) throw py::type_error("OptimizerConfig: lr is required");
  for (const auto& [key, value] : options) {
    const auto name = key.cast<std::string>();
    bool known = false;
    for (const auto& [field, member] : kHyper) {
      if (name != field) continue;
      config.*member = value.cast<double>();
      known = true;
    }
    if (!known) throw py::type_error("OptimizerConfig: unexpected option '" + name + "'");
  }
  if (const char* what = kernels::find_config_error(config)) {
    throw Error(ErrorCode::kInvalidArgument, "OptimizerConfig(" + kind + "): " + what);
  }
  return config;
}

py::tuple fields_of(const OptimizerConfig& config) {
  py::list fields;
  fields.append(kind_name(config));
  for (const auto& [name, member] : kHyper) fields.append(config.*member);
  fields.append(config.nesterov());
  return py::tuple(fields);
}

std::string show(const OptimizerConfig& config) {
  std::string text = "OptimizerConfig('" + kind_name(config) + "'";
  for (const auto& [name, member] : kHyper) {
    if (config.*member == 0.0) continue;
    text +=
        std::string(", ") + name + "=" + py::repr(py::float_(config.*member)).cast<std::string>();
  }
  return text + (config.nesterov() ? ", nesterov=True)" : ")");
}

wire::DType dtype_from(const std::string& name) {
  if (name == "float32") return wire::DType::kFloat32;
  if (name == "float64") return wire::DType::kFloat64;
  throw Error(ErrorCode::kInvalidArgument,
              "BlockSpec: dtype must be 'float32' or 'float64', got '" + name + "'");
}

wire::WireDType wire_dtype_from(const std::string& name) {
  for (uint8_t i = 0; i < wire::kWireDTypeCount; ++i) {
    const auto dtype = static_cast<wire::WireDType>(i);
    if (name == wire::name_of(dtype)) return dtype;
  }
  throw Error(ErrorCode::kInvalidArgument, "ParamSetLayout: unknown wire dtype '" + name + "'");
}

// Factor, whether it adapts, momentum and epsilon of the running mean.
using Compensation = std::tuple<double, bool, double, double>;

wire::DelayCompensation compensation_from(const std::optional<Compensation>& options) {
  if (!options) return {};
  const auto& [factor, adaptive, momentum, epsilon] = *options;
  if (!adaptive) return {wire::Compensation::kConstant, factor, 0.0, 0.0};
  return {wire::Compensation::kAdaptive, factor, momentum, epsilon};
}

void bind_config(py::module_& module) {
  py::class_<OptimizerConfig> config(module, "OptimizerConfig");
  config
      .def(py::init([](const std::string& kind, bool nesterov, const py::kwargs& options) {
             return make_config(kind, nesterov, options);
           }),
           py::arg("kind"), py::kw_only(), py::arg("nesterov") = false)
      .def_property_readonly("kind", &kind_name)
      .def_property_readonly("nesterov", &OptimizerConfig::nesterov)
      .def("__eq__",
           [](const OptimizerConfig& self, const py::object& other) {
             return py::isinstance<OptimizerConfig>(other) &&
                    self == other.cast<const OptimizerConfig&>();
           })
      .def("__hash__", [](const OptimizerConfig& self) { return py::hash(fields_of(self)); })
      .def("__repr__", &show);
  for (const auto& [name, member] : kHyper) config.def_readonly(name, member);
}

void bind_state(py::module_& module) {
  module.def(
      "init_state",
      [](const OptimizerConfig& config, uintptr_t state, uint64_t rows, uint64_t dim) {
        auto* row = reinterpret_cast<float*>(state);
        const size_t size = kernels::state_elements(config, dim, dim);
        for (uint64_t i = 0; i < rows; ++i, row += size) {
          kernels::init_state(config, row, dim, dim);
        }
      },
      py::arg("config"), py::arg("state"), py::arg("rows"), py::arg("dim"));
  module.def(
      "state_elements",
      [](const OptimizerConfig& config, uint64_t elements, uint64_t row_width) {
        return kernels::state_elements(config, elements, row_width);
      },
      py::arg("config"), py::arg("elements"), py::arg("row_width"));
}

// Name, first and second argument; first row, row after the last, value.
using Step = std::tuple<std::string, double, double>;
using Override = std::tuple<uint64_t, uint64_t, double>;

// Kind, count, probability, bytes of the sketch.
using AdmissionTuple = std::tuple<std::string, uint32_t, double, uint64_t>;
// Steps unseen, milliseconds unseen, fewer updates than, most rows; each 0 if not given; order.
using EvictionTuple = std::tuple<uint64_t, uint64_t, uint32_t, uint64_t, std::string>;

constexpr std::array<const char*, 3> kAdmissionNames{"all", "count", "probability"};
constexpr std::array<const char*, 2> kOrderNames{"lru", "lfu"};

template <typename Enum, size_t n>
Enum named_in(const std::array<const char*, n>& names, const std::string& name, const char* what) {
  std::string known;
  for (size_t i = 0; i < n; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
    known += (known.empty() ? "" : ", ") + std::string(names[i]);
  }
  throw Error(ErrorCode::kInvalidArgument, std::string("TableSpec: unknown ") + what + " '" + name +
                                               "', expected one of " + known);
}

wire::Admission admission_from(const AdmissionTuple& given) {
  const auto& [kind, count, probability, sketch_bytes] = given;
  return {named_in<wire::AdmissionKind>(kAdmissionNames, kind, "admission"), count, probability,
          sketch_bytes};
}

AdmissionTuple admission_of(const TableSpec& table) {
  const auto& [kind, count, probability, sketch_bytes] = table.admission;
  return {kAdmissionNames.at(static_cast<size_t>(kind)), count, probability, sketch_bytes};
}

wire::Eviction eviction_from(const std::optional<EvictionTuple>& given) {
  if (!given) return {};
  const auto& [unseen_steps, unseen_ms, min_count, max_rows, order] = *given;
  return {true,      unseen_steps, unseen_ms,
          min_count, max_rows,     named_in<wire::EvictionOrder>(kOrderNames, order, "order")};
}

std::optional<EvictionTuple> eviction_of(const TableSpec& table) {
  const wire::Eviction& found = table.eviction;
  if (!found.on) return std::nullopt;
  return EvictionTuple{found.unseen_steps, found.unseen_ms, found.min_count, found.max_rows,
                       kOrderNames.at(static_cast<size_t>(found.order))};
}

kernels::InitialOp initial_op_from(const std::string& name) {
  for (uint32_t i = 1; i <= kernels::kInitialOpCount; ++i) {
    const auto op = static_cast<kernels::InitialOp>(i);
    if (name == kernels::initial_op_name(op)) return op;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "TableSpec: unknown step '" + name +
                  "', expected normal, uniform, fill, mul, add, clamp or erfinv");
}

TableSpec make_table(std::string name, uint64_t rows, uint32_t dim, uint32_t group, bool remote,
                     uint64_t seed, const std::vector<Step>& initial,
                     const std::vector<Override>& overrides, bool open, bool unknown_zeros,
                     uint64_t max_rows, const AdmissionTuple& admission,
                     const std::optional<EvictionTuple>& eviction) {
  TableSpec table{std::move(name), rows, dim, group, remote, seed};
  table.open = open;
  table.unknown_zeros = unknown_zeros;
  table.max_rows = max_rows;
  table.admission = admission_from(admission);
  table.eviction = eviction_from(eviction);
  for (const auto& [op, a, b] : initial) table.initial.push_back({initial_op_from(op), a, b});
  for (const auto& [begin, end, value] : overrides) table.overrides.push_back({begin, end, value});
  if (const char* what = kernels::find_initial_error(table.initial, table.overrides)) {
    throw Error(ErrorCode::kInvalidArgument, "TableSpec(" + table.name + "): " + what);
  }
  return table;
}

std::vector<Step> steps_of(const TableSpec& table) {
  std::vector<Step> steps;
  for (const auto& [op, a, b] : table.initial) {
    steps.emplace_back(kernels::initial_op_name(op), a, b);
  }
  return steps;
}

std::vector<Override> overrides_of(const TableSpec& table) {
  std::vector<Override> overrides;
  for (const auto& [begin, end, value] : table.overrides) overrides.emplace_back(begin, end, value);
  return overrides;
}

void make_rows(const TableSpec& table, uintptr_t keys, uint64_t count, uintptr_t out) {
  const GilReleased release;
  const std::span wanted(reinterpret_cast<const int64_t*>(keys), count);
  wire::initial_rows(table).fill(wanted, table.dim, reinterpret_cast<float*>(out));
}

void bind_tables(py::module_& module) {
  py::class_<TableSpec>(module, "TableSpec")
      .def(py::init(&make_table), py::arg("name"), py::arg("rows"), py::arg("dim"),
           py::arg("group") = 0, py::arg("remote") = false, py::arg("seed") = 0,
           py::arg("initial") = std::vector<Step>(), py::arg("overrides") = std::vector<Override>(),
           py::arg("open") = false, py::arg("unknown_zeros") = false, py::arg("max_rows") = 0,
           py::arg("admission") = AdmissionTuple("all", 0, 1.0, 0),
           py::arg("eviction") = py::none())
      .def_readonly("name", &TableSpec::name)
      .def_readonly("rows", &TableSpec::rows)
      .def_readonly("dim", &TableSpec::dim)
      .def_readonly("group", &TableSpec::group)
      .def_readonly("remote", &TableSpec::remote)
      .def_readonly("seed", &TableSpec::seed)
      .def_property_readonly("initial", &steps_of)
      .def_property_readonly("overrides", &overrides_of)
      .def_readonly("open", &TableSpec::open)
      .def_readonly("unknown_zeros", &TableSpec::unknown_zeros)
      .def_readonly("max_rows", &TableSpec::max_rows)
      .def_property_readonly("admission", &admission_of)
      .def_property_readonly("eviction", &eviction_of);
  module.def("initial_rows", &make_rows, py::arg("spec"), py::arg("keys"), py::arg("count"),
             py::arg("out"));
}

void bind_specs(py::module_& module) {
  py::class_<wire::BlockSpec>(module, "BlockSpec")
      .def(
          py::init([](std::string name, uint64_t elements, const std::string& dtype, uint32_t shard,
                      uint32_t group, uint32_t parameter, uint64_t offset, uint64_t row_width) {
            return wire::BlockSpec{std::move(name), elements, dtype_from(dtype), shard, group,
                                   parameter,       offset,   row_width};
          }),
          py::arg("name"), py::arg("elements"), py::arg("dtype") = "float32", py::arg("shard") = 0,
          py::arg("group") = 0, py::arg("parameter") = 0, py::arg("offset") = 0,
          py::arg("row_width") = 1)
      .def_readonly("name", &wire::BlockSpec::name)
      .def_readonly("elements", &wire::BlockSpec::elements)
      .def_property_readonly("dtype",
                             [](const wire::BlockSpec& self) {
                               return self.dtype == wire::DType::kFloat64 ? "float64" : "float32";
                             })
      .def_readonly("shard", &wire::BlockSpec::shard)
      .def_readonly("group", &wire::BlockSpec::group)
      .def_readonly("parameter", &wire::BlockSpec::parameter)
      .def_readonly("offset", &wire::BlockSpec::offset)
      .def_readonly("row_width", &wire::BlockSpec::row_width);
}

}  // namespace

void bind_layout(py::module_& module) {
  bind_config(module);
  bind_state(module);
  bind_tables(module);
  bind_specs(module);
  py::class_<wire::ParamSetLayout>(module, "ParamSetLayout")
      .def(py::init([](std::vector<OptimizerConfig> configs, std::vector<wire::TableSpec> tables,
                       std::vector<wire::BlockSpec> blocks, bool on_arrival,
                       std::optional<uint64_t> max_staleness, std::vector<uint32_t> trainer_groups,
                       bool exchanges_deltas, const std::optional<Compensation>& compensation,
                       const std::string& push_dtype, const std::string& pull_dtype,
                       double average_decay) {
             wire::ParamSetLayout layout;
             layout.compensation = compensation_from(compensation);
             if (on_arrival) layout.mode = wire::UpdateMode::kOnArrival;
             layout.max_staleness = max_staleness.value_or(wire::kAnyStaleness);
             layout.exchanges_deltas = exchanges_deltas;
             layout.trainer_groups = std::move(trainer_groups);
             layout.push_dtype = wire_dtype_from(push_dtype);
             layout.pull_dtype = wire_dtype_from(pull_dtype);
             layout.average_decay = average_decay;
             layout.configs = std::move(configs);
             layout.tables = std::move(tables);
             layout.blocks = std::move(blocks);
             return layout;
           }),
           py::arg("configs"), py::arg("tables"), py::arg("blocks"), py::arg("on_arrival") = false,
           py::arg("max_staleness") = py::none(),
           py::arg("trainer_groups") = std::vector<uint32_t>(), py::arg("exchanges_deltas") = false,
           py::arg("compensation") = py::none(), py::arg("push_dtype") = "fp32",
           py::arg("pull_dtype") = "fp32", py::arg("average_decay") = 0.0)
      .def_readonly("average_decay", &wire::ParamSetLayout::average_decay)
      .def_property_readonly("max_staleness",
                             [](const wire::ParamSetLayout& self) -> std::optional<uint64_t> {
                               if (self.max_staleness == wire::kAnyStaleness) return std::nullopt;
                               return self.max_staleness;
                             })
      .def_property_readonly(
          "push_dtype",
          [](const wire::ParamSetLayout& self) { return wire::name_of(self.push_dtype); })
      .def_property_readonly(
          "pull_dtype",
          [](const wire::ParamSetLayout& self) { return wire::name_of(self.pull_dtype); })
      .def_readonly("trainer_groups", &wire::ParamSetLayout::trainer_groups)
      .def_readonly("configs", &wire::ParamSetLayout::configs)
      .def_readonly("tables", &wire::ParamSetLayout::tables)
      .def_readonly("blocks", &wire::ParamSetLayout::blocks);
}

}  // namespace cpudist::bind
