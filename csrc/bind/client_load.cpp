// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What ParamSet has for snapshots that are loaded, and for tables as wholes.
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bind/client_holder.h"
#include "wire/snapshot/load.h"

namespace cpudist::bind {

namespace {

void load_rows(const ParamSetHolder& self, uint32_t server, uint32_t table, bool clear,
               uint64_t seed, uint64_t round, uint64_t table_step, std::string snapshot,
               std::string file, uint64_t file_bytes, uint64_t row_begin, uint64_t row_end,
               const std::array<uint64_t, wire::kLoadColumns>& offsets,
               std::vector<uint32_t> crcs) {
  wire::Load load;
  load.table = table;
  load.kind = clear ? wire::LoadKind::kReplace : wire::LoadKind::kRows;
  load.seed = seed;
  load.version.round = round;
  load.table_step = table_step;
  load.snapshot = std::move(snapshot);
  load.file = std::move(file);
  load.file_bytes = file_bytes;
  load.row_begin = row_begin;
  load.row_end = row_end;
  load.offsets = offsets;
  load.checksums = std::move(crcs);
  self.get().load(server, load);
}

void load_version(const ParamSetHolder& self, uint32_t server, uint64_t round, uint64_t samples,
                  uint64_t steps) {
  wire::Load load;
  load.kind = wire::LoadKind::kVersion;
  load.version = {round, samples, steps};
  self.get().load(server, load);
}

py::dict counts_of_table(const ParamSetHolder& self, uint32_t table) {
  wire::TableCounts counts;
  {
    const GilReleased no_gil;
    counts = self.get().table_counts(table);
  }
  py::dict result;
  result["rows"] = counts.rows;
  result["bytes"] = counts.bytes;
  result["created"] = counts.created;
  result["filtered"] = counts.filtered;
  result["evicted"] = counts.evicted;
  result["unknown_reads"] = counts.unknown_reads;
  return result;
}

uint64_t shrink_table(const ParamSetHolder& self, uint32_t table) {
  return self.get().shrink(table);
}

}  // namespace

void bind_loads(ParamSetClass& set) {
  set.def("load_rows", &load_rows, py::arg("server"), py::arg("table"), py::kw_only(),
          py::arg("clear"), py::arg("seed"), py::arg("round"), py::arg("table_step"),
          py::arg("snapshot"), py::arg("file"), py::arg("file_bytes"), py::arg("row_begin"),
          py::arg("row_end"), py::arg("offsets"), py::arg("crcs"), NoGil())
      .def("load_version", &load_version, py::arg("server"), py::arg("round"), py::arg("samples"),
           py::arg("steps"), NoGil())
      .def("table_stats", &counts_of_table, py::arg("table"))
      .def("shrink", &shrink_table, py::arg("table"), NoGil());
}

}  // namespace cpudist::bind
