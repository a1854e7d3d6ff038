// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Cuts of snapshots: methods of the class ParamSet.
#include <pybind11/stl.h>

#include <string>
#include <tuple>

#include "bind/client_holder.h"
#include "client/param_set.h"

namespace cpudist::bind {

namespace {

std::tuple<bool, std::string, std::string, int> mark_cut(const ParamSetHolder& self,
                                                         uint64_t number, const std::string& name,
                                                         uint64_t wait_ms, uint64_t base) {
  const auto [_, taken, told, reason, taken_back] =
      mark_answer(self.get().mark_cut(number, name, wait_ms, base));
  return {taken, told, reason, taken_back};
}

std::string announce_cut(const ParamSetHolder& self, uint64_t number, const std::string& name,
                         uint64_t wait_ms) {
  return self.get().announce_cut(number, name, wait_ms);
}

py::list files_of(const wire::CutStatus& status) {
  py::list files;
  for (const wire::CutFile& file : status.files) {
    py::dict entry;
    entry["name"] = file.name;
    if (file.table == wire::kDenseFile) {
      entry["table"] = py::none();
    } else {
      entry["table"] = file.table;
    }
    entry["rows"] = file.rows;
    entry["bytes"] = file.bytes;
    entry["crcs"] = file.checksums;
    files.append(entry);
  }
  return files;
}

py::dict cut_status(const ParamSetHolder& self, uint32_t server, uint64_t number,
                    const std::string& token) {
  wire::CutStatus status;
  {
    const GilReleased no_gil;
    status = self.get().cut_status(server, number, token);
  }
  py::dict result;
  result["state"] = static_cast<uint32_t>(status.state);
  result["shard"] = status.shard;
  result["reason"] = status.reason;
  result["round"] = status.version.round;
  result["samples"] = status.version.samples;
  result["steps"] = status.version.steps;
  result["table_steps"] = status.table_steps;
  result["block_steps"] = status.block_steps;
  result["members"] = status.members;
  result["present"] = status.present;
  result["lost"] = status.lost;
  result["files"] = files_of(status);
  result["base"] = status.base;
  result["can_be_base"] = status.can_be_base;
  return result;
}

client::Residues& residues_of(const ParamSetHolder& self) {
  client::Residues* const residues = self.get().residues();
  if (residues != nullptr) return *residues;
  throw Error(ErrorCode::kInvalidArgument, "pushes of this trainer hold nothing back");
}

py::bytes bytes_of(const void* data, size_t size_bytes) {
  return {static_cast<const char*>(data), size_bytes};
}

std::pair<py::bytes, py::bytes> held_rows(const ParamSetHolder& self, uint32_t table) {
  const client::Residues::Held held = residues_of(self).rows_of(table);
  return {bytes_of(held.keys.data(), held.keys.size() * sizeof(int64_t)),
          bytes_of(held.values.data(), held.values.size() * sizeof(float))};
}

py::bytes held_block(const ParamSetHolder& self, uint32_t block) {
  const std::span<const float> held = residues_of(self).block(block);
  return bytes_of(held.data(), held.size_bytes());
}

void hold_rows(const ParamSetHolder& self, uint32_t table, Address keys, uint64_t count,
               Address values) {
  residues_of(self).put_rows(table, {at<const int64_t>(keys), count}, at<const float>(values));
}

void hold_block(const ParamSetHolder& self, uint32_t block, Address values) {
  residues_of(self).put_block(block, at<const float>(values));
}

}  // namespace

void bind_cuts(ParamSetClass& set) {
  set.def("mark_cut", &mark_cut, py::arg("number"), py::arg("name"), py::arg("wait_ms"),
          py::arg("base") = 0, NoGil())
      .def("announce_cut", &announce_cut, py::arg("number"), py::arg("name"), py::arg("wait_ms"),
           NoGil())
      .def("take_marker_back", method<ParamSetHolder>(&client::ParamSet::take_marker_back),
           py::arg("number"), NoGil())
      .def("abandon_cut", method<ParamSetHolder>(&client::ParamSet::abandon_cut), py::arg("number"),
           NoGil())
      .def("holds_back",
           [](const ParamSetHolder& self) { return self.get().residues() != nullptr; })
      .def("held_rows", &held_rows, py::arg("table"))
      .def("held_block", &held_block, py::arg("block"))
      .def("forget_held", [](const ParamSetHolder& self) { residues_of(self).clear(); })
      .def("hold_rows", &hold_rows, py::arg("table"), py::arg("keys"), py::arg("count"),
           py::arg("values"))
      .def("hold_block", &hold_block, py::arg("block"), py::arg("values"))
      .def("cut_wanted", method<ParamSetHolder>(&client::ParamSet::cut_wanted), NoGil())
      .def("cut_status", &cut_status, py::arg("server"), py::arg("number"), py::arg("token") = "");
}

}  // namespace cpudist::bind
