// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The classes DataSchema, DataBatch and DataReader.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/data_holders.h"

namespace cpudist::bind {

namespace {

using data::Batch;

data::Slot make_slot(const SlotArgument& argument, data::Format format, bool columns_only) {
  const auto& [name, kind, dim, hash_range, missing, used, columns, sparse] = argument;
  if (kind != "int" && kind != "float") {
    throw Error(ErrorCode::kInvalidArgument,
                "slot '" + name + "': expected the kind 'int' or 'float', found '" + kind + "'");
  }
  data::Slot slot;
  slot.name = name;
  slot.kind = kind == "int" ? data::SlotKind::kInt : data::SlotKind::kFloat;
  slot.dim = dim;
  // Columns that are fed have been hashed and have no missing values.
  slot.hash_range = columns_only ? 0 : hash_range;
  slot.hex = sparse && format == data::Format::kCriteo;
  if (slot.kind == data::SlotKind::kInt) {
    slot.missing_int = missing.cast<int64_t>();
  } else {
    slot.missing_float = missing.cast<float>();
  }
  slot.used = used;
  if (format == data::Format::kCsv) slot.columns = columns;
  return slot;
}

char one_byte(const std::string& text, const char* what) {
  if (text.size() == 1) return text[0];
  throw Error(ErrorCode::kInvalidArgument,
              std::string(what) + ": expected one byte, found '" + text + "'");
}

std::unique_ptr<DataSchema> make_schema(const std::string& format,
                                        const std::vector<SlotArgument>& slots,
                                        const std::string& delimiter, const std::string& separator,
                                        bool instance_ids) {
  auto made = std::make_unique<DataSchema>();
  data::Schema& schema = made->schema;
  const bool columns_only = format == "parquet";
  if (format == "criteo") {
    schema.format = data::Format::kCriteo;
  } else if (format == "csv") {
    schema.format = data::Format::kCsv;
  } else if (format != "multislot" && !columns_only) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "format: expected 'multislot', 'criteo', 'csv' or 'parquet', found '" + format + "'");
  }
  for (const SlotArgument& slot : slots) {
    schema.slots.push_back(make_slot(slot, schema.format, columns_only));
  }
  schema.delimiter = one_byte(delimiter, "delimiter");
  schema.separator = one_byte(separator, "separator");
  schema.instance_ids = instance_ids;
  schema.check();
  return made;
}

// A view that keeps the batch's memory. The memory goes back to its pool with the last view.
template <typename Seen, typename Held>
py::array view(const std::shared_ptr<Batch>& batch, const Held* held, size_t size) {
  auto owner = std::make_unique<std::shared_ptr<Batch>>(batch);
  const py::capsule keeper(
      owner.get(), [](void* pointer) { delete static_cast<std::shared_ptr<Batch>*>(pointer); });
  static_cast<void>(owner.release());
  return py::array_t<Seen>(static_cast<py::ssize_t>(size), reinterpret_cast<const Seen*>(held),
                           keeper);
}

py::object instance_ids(const DataBatch& self) {
  if (!self.has_instance_ids) return py::none();
  const auto& ids = self.batch->instance_ids;
  return view<int64_t>(self.batch, ids.data(), ids.size());
}

// [[[split, offset, window, delivered], ...], turn, tail_delivered]
py::list position_list(const data::ReaderPosition& position) {
  py::list lanes;
  for (const data::LanePosition& lane : position.lanes) {
    py::list numbers;
    for (const uint64_t number : {lane.split, lane.offset, lane.window, lane.delivered}) {
      numbers.append(number);
    }
    lanes.append(std::move(numbers));
  }
  py::list result;
  result.append(std::move(lanes));
  result.append(position.turn);
  result.append(position.tail_delivered);
  return result;
}

using PositionArgument = std::tuple<std::vector<std::array<uint64_t, 4>>, uint64_t, uint64_t>;

data::ReaderPosition make_position(const PositionArgument& argument) {
  data::ReaderPosition position;
  for (const auto& [split, offset, window, delivered] : std::get<0>(argument)) {
    position.lanes.push_back({split, offset, window, delivered});
  }
  position.turn = std::get<1>(argument);
  position.tail_delivered = std::get<2>(argument);
  return position;
}

std::unique_ptr<ReaderHolder> make_reader(const DataSchema& schema, std::vector<std::string> files,
                                          const std::vector<LaneArgument>& lanes,
                                          uint64_t batch_size, bool drop_last,
                                          uint64_t buffer_bytes, uint64_t line_limit_bytes,
                                          const py::object& command, double command_timeout_s,
                                          bool fed, const std::string& policy,
                                          const py::object& quarantine,
                                          std::optional<uint64_t> seed, uint64_t window_records,
                                          const std::optional<PositionArgument>& position) {
  data::ReaderOptions options;
  options.schema = schema.schema;
  options.input = make_input(std::move(files), command, command_timeout_s, fed, line_limit_bytes);
  options.lanes = make_lanes(lanes);
  options.batch_size = batch_size;
  options.drop_last = drop_last;
  options.buffer_bytes = buffer_bytes;
  options.policy = make_policy(policy);
  options.quarantine = path_or_none(quarantine);
  options.seed = seed;
  options.window_records = window_records;
  if (position) options.position = make_position(*position);
  return std::make_unique<ReaderHolder>(
      std::make_unique<data::Reader>(std::move(options), schema.pool), "DataReader");
}

py::object next_batch(const ReaderHolder& self, double timeout_s, const py::object& tell) {
  data::Reader& reader = self.get();
  const data::Wait wait = python_wait(timeout_s, reader.notices(), tell);
  data::Delivered delivered;
  {
    const GilReleased no_gil;
    delivered = reader.next(wait);
  }
  if (!delivered.batch) return py::none();
  return py::cast(DataBatch{std::move(delivered.batch), reader.schema().instance_ids,
                            position_list(delivered.position)});
}

py::array_t<int64_t> hash_texts(const py::array_t<int64_t, py::array::c_style>& offsets,
                                const py::buffer& bytes, uint32_t slot_index, uint64_t hash_range) {
  const py::buffer_info info = bytes.request();
  const auto size = static_cast<int64_t>(info.size * info.itemsize);
  const auto* texts = static_cast<const char*>(info.ptr);
  const py::ssize_t count = std::max<py::ssize_t>(offsets.size() - 1, 0);
  if (hash_range < 2) throw Error(ErrorCode::kInvalidArgument, "hash_range must be at least 2");
  py::array_t<int64_t> ids(count);
  int64_t* to = ids.mutable_data();
  const int64_t* ends = offsets.data();
  const GilReleased no_gil;
  for (py::ssize_t i = 0; i < count; ++i) {
    if (ends[i] < 0 || ends[i + 1] < ends[i] || ends[i + 1] > size) {
      throw Error(ErrorCode::kInvalidArgument,
                  "offsets of texts must rise within [0, " + std::to_string(size) + "]");
    }
    const auto length = static_cast<size_t>(ends[i + 1] - ends[i]);
    to[i] = data::hash_text(texts + ends[i], length, slot_index, hash_range);
  }
  return ids;
}

void bind_batch(py::module_& module) {
  py::class_<DataSchema>(module, "DataSchema")
      .def(py::init(&make_schema), py::kw_only(), py::arg("format"), py::arg("slots"),
           py::arg("delimiter") = ",", py::arg("separator") = "|", py::arg("instance_ids") = false);
  py::class_<DataBatch>(module, "DataBatch")
      .def_property_readonly("records", [](const DataBatch& self) { return self.batch->records; })
      .def_property_readonly("ints",
                             [](const DataBatch& self) {
                               const auto& ints = self.batch->ints;
                               return view<int64_t>(self.batch, ints.data(), ints.size());
                             })
      .def_property_readonly("floats",
                             [](const DataBatch& self) {
                               const auto& floats = self.batch->floats;
                               return view<float>(self.batch, floats.data(), floats.size());
                             })
      .def_property_readonly("sections", [](const DataBatch& self) { return self.batch->values; })
      .def_property_readonly("instance_ids", &instance_ids)
      .def_readonly("position", &DataBatch::position);
  module.def("hash_texts", &hash_texts, py::arg("offsets"), py::arg("texts"), py::arg("slot_index"),
             py::arg("hash_range"));
}

}  // namespace

void bind_data(py::module_& module) {
  bind_batch(module);
  using no_gil = py::call_guard<GilReleased>;
  const data::ReaderOptions defaults;
  py::class_<ReaderHolder>(module, "DataReader")
      .def(py::init(&make_reader), py::arg("schema"), py::kw_only(), py::arg("files"),
           py::arg("lanes"), py::arg("batch_size"), py::arg("drop_last") = defaults.drop_last,
           py::arg("buffer_bytes") = defaults.buffer_bytes,
           py::arg("line_limit_bytes") = data::kLineLimitBytes, py::arg("command") = py::none(),
           py::arg("command_timeout_s") = kCommandTimeoutS, py::arg("fed") = false,
           py::arg("policy") = "raise", py::arg("quarantine") = py::none(),
           py::arg("seed") = py::none(), py::arg("window_records") = defaults.window_records,
           py::arg("position") = py::none())
      .def("next", &next_batch, py::arg("timeout_s"), py::arg("tell") = py::none())
      .def("position",
           [](const ReaderHolder& self) { return position_list(self.get().position()); })
      .def(
          "feed",
          [](const ReaderHolder& self, uint64_t lane, const py::buffer& bytes) {
            return feed_bytes(&self.get().feeds(), lane, bytes);
          },
          py::arg("lane"), py::arg("bytes"))
      .def(
          "feed_columns",
          [](const ReaderHolder& self, uint64_t lane, uint64_t records, const py::list& columns) {
            return feed_columns(&self.get().feeds(), lane, records, columns);
          },
          py::arg("lane"), py::arg("records"), py::arg("columns"))
      .def(
          "feed_end_of_file",
          [](const ReaderHolder& self, uint64_t lane) {
            return feed_end_of_file(&self.get().feeds(), lane);
          },
          py::arg("lane"))
      .def(
          "feed_failure",
          [](const ReaderHolder& self, uint64_t lane, const std::string& message) {
            return feed_failure(&self.get().feeds(), lane, message);
          },
          py::arg("lane"), py::arg("message"))
      .def("bad_lines",
           [](const ReaderHolder& self) { return bad_line_counts(self.get().bad_lines()); })
      .def(
          "notices", [](const ReaderHolder& self) { return self.get().bad_lines().take_notices(); },
          no_gil())
      .def(
          "command_notices", [](const ReaderHolder& self) { return self.get().notices().take(); },
          no_gil())
      .def("stop", [](const ReaderHolder& self) { self.get().stop(); }, no_gil());
  bind_data_command(module);
  bind_data_store(module);
  bind_data_shuffle(module);
}

}  // namespace cpudist::bind
