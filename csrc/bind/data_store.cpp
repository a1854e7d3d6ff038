// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The classes DataStore and DataStoreReader.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/data_holders.h"

namespace cpudist::bind {

namespace {

// What `read` makes of the load that is going on, or of the last one, or an empty Result. Without
// the GIL: who changes the store holds its mutex for as long as that takes.
template <typename Result, typename Read>
Result of_loader(const StoreHolder& self, const Read& read) {
  const data::Store& store = self.get();
  const GilReleased no_gil;
  const auto loader = store.loader();
  return loader ? Result(read(loader)) : Result();
}

std::shared_ptr<data::StoreLoader> loader_of(const StoreHolder& self) {
  using Loader = std::shared_ptr<data::StoreLoader>;
  return of_loader<Loader>(self, [](const Loader& loader) { return loader; });
}

void start_load(const StoreHolder& self, std::vector<std::string> files,
                const std::vector<LaneArgument>& lanes, uint64_t buffer_bytes,
                uint64_t line_limit_bytes, const py::object& command, double command_timeout_s,
                bool fed, const std::string& policy, const py::object& quarantine) {
  data::LoadOptions options;
  options.input = make_input(std::move(files), command, command_timeout_s, fed, line_limit_bytes);
  options.lanes = make_lanes(lanes);
  options.buffer_bytes = buffer_bytes;
  options.policy = make_policy(policy);
  options.quarantine = path_or_none(quarantine);
  const GilReleased no_gil;
  self.get().start_load(std::move(options));
}

void wait_load(const StoreHolder& self, double timeout_s, const py::object& tell) {
  const auto loader = loader_of(self);
  if (!loader) return;
  const data::Wait wait = python_wait(timeout_s, loader->notices(), tell);
  const GilReleased no_gil;
  self.get().wait_load(wait);
}

py::dict load_progress(const StoreHolder& self) {
  const auto progress =
      of_loader<data::LoadProgress>(self, [](const auto& loader) { return loader->progress(); });
  py::dict result;
  result["records"] = progress.records;
  result["size_bytes"] = progress.size_bytes;
  result["parts_done"] = progress.splits_done;
  result["parts"] = progress.splits;
  return result;
}

std::unique_ptr<StoreReaderHolder> make_store_reader(const StoreHolder& self, uint64_t batch_size,
                                                     bool drop_last, uint64_t begin_record,
                                                     uint64_t threads, uint64_t buffer_bytes,
                                                     std::optional<uint64_t> seed) {
  data::StoreReaderOptions options;
  options.batch_size = batch_size;
  options.drop_last = drop_last;
  options.begin_record = begin_record;
  options.threads = threads;
  options.buffer_bytes = buffer_bytes;
  std::unique_ptr<data::StoreReader> reader;
  {
    const GilReleased no_gil;
    reader = self.get().reader(options, seed, self.pool);
  }
  return std::make_unique<StoreReaderHolder>(std::move(reader), "DataStoreReader");
}

py::object next_store_batch(const StoreReaderHolder& self, double timeout_s,
                            const py::object& /* nothing to tell */) {
  data::StoreReader& reader = self.get();
  const data::Wait wait = python_wait(timeout_s);
  data::StoreBatch made;
  {
    const GilReleased no_gil;
    made = reader.next(wait);
  }
  if (!made.batch) return py::none();
  return py::cast(DataBatch{std::move(made.batch), reader.schema().instance_ids,
                            py::int_(made.records_before)});
}

py::tuple checksum(const StoreHolder& self) {
  data::Checksum sums;
  {
    const GilReleased no_gil;
    sums = self.get().checksum();
  }
  return py::make_tuple(sums.sum, sums.combined);
}

// Calls a function with what feeds the load, or with null where nothing is loaded any more.
template <typename Function, typename... Arguments>
bool feed(const StoreHolder& self, const Function& function, const Arguments&... arguments) {
  const auto loader = loader_of(self);
  return function(loader ? &loader->feeds() : nullptr, arguments...);
}

py::dict bad_lines(const StoreHolder& self) {
  const auto loader = loader_of(self);
  return loader ? bad_line_counts(loader->bad_lines()) : py::dict();
}

std::vector<std::string> notices(const StoreHolder& self) {
  return of_loader<std::vector<std::string>>(
      self, [](const auto& loader) { return loader->bad_lines().take_notices(); });
}

std::vector<std::string> command_notices(const StoreHolder& self) {
  return of_loader<std::vector<std::string>>(
      self, [](const auto& loader) { return loader->notices().take(); });
}

void bind_feeding(py::class_<StoreHolder>& store) {
  store
      .def(
          "feed",
          [](const StoreHolder& self, uint64_t lane, const py::buffer& bytes) {
            return feed(self, &feed_bytes, lane, bytes);
          },
          py::arg("lane"), py::arg("bytes"))
      .def(
          "feed_columns",
          [](const StoreHolder& self, uint64_t lane, uint64_t records, const py::list& columns) {
            return feed(self, &feed_columns, lane, records, columns);
          },
          py::arg("lane"), py::arg("records"), py::arg("columns"))
      .def(
          "feed_end_of_file",
          [](const StoreHolder& self, uint64_t lane) {
            return feed(self, &feed_end_of_file, lane);
          },
          py::arg("lane"))
      .def(
          "feed_failure",
          [](const StoreHolder& self, uint64_t lane, const std::string& message) {
            return feed(self, &feed_failure, lane, message);
          },
          py::arg("lane"), py::arg("message"));
}

}  // namespace

void bind_data_store(py::module_& module) {
  using no_gil = py::call_guard<GilReleased>;
  const data::StoreReaderOptions defaults;
  const data::LoadOptions load_defaults;
  py::class_<StoreReaderHolder>(module, "DataStoreReader")
      .def("next", &next_store_batch, py::arg("timeout_s"), py::arg("tell") = py::none())
      .def("position", [](const StoreReaderHolder& self) { return self.get().position(); })
      .def("notices", [](const StoreReaderHolder&) { return std::vector<std::string>(); })
      .def("command_notices", [](const StoreReaderHolder&) { return std::vector<std::string>(); })
      .def("stop", [](const StoreReaderHolder& self) { self.get().stop(); }, no_gil());
  py::class_<StoreHolder> store(module, "DataStore");
  store
      .def(py::init([](const DataSchema& schema) {
             return std::make_unique<StoreHolder>(std::make_unique<data::Store>(schema.schema),
                                                  schema.pool);
           }),
           py::arg("schema"))
      .def("load", &start_load, py::kw_only(), py::arg("files"), py::arg("lanes"),
           py::arg("buffer_bytes") = load_defaults.buffer_bytes,
           py::arg("line_limit_bytes") = data::kLineLimitBytes, py::arg("command") = py::none(),
           py::arg("command_timeout_s") = kCommandTimeoutS, py::arg("fed") = false,
           py::arg("policy") = "raise", py::arg("quarantine") = py::none())
      .def("wait", &wait_load, py::arg("timeout_s"), py::arg("tell") = py::none())
      .def("progress", &load_progress)
      .def_property_readonly("records",
                             [](const StoreHolder& self) {
                               const data::Store& found = self.get();
                               const GilReleased released;
                               return found.records();
                             })
      .def_property_readonly("size_bytes",
                             [](const StoreHolder& self) {
                               const data::Store& found = self.get();
                               const GilReleased released;
                               return found.size_bytes();
                             })
      .def(
          "permute", [](const StoreHolder& self, uint64_t seed) { self.get().permute(seed); },
          py::arg("seed"), no_gil())
      .def(
          "merge_by_instance",
          [](const StoreHolder& self, uint64_t size) { return self.get().merge_by_instance(size); },
          py::arg("size"), no_gil())
      .def(
          "exchange_slots",
          [](const StoreHolder& self, const std::vector<size_t>& used_slots, uint64_t seed) {
            self.get().exchange_slots(used_slots, seed);
          },
          py::arg("used_slots"), py::arg("seed"), no_gil())
      .def(
          "restore_slots", [](const StoreHolder& self) { self.get().restore_slots(); }, no_gil())
      .def_property_readonly("slots_exchanged",
                             [](const StoreHolder& self) {
                               const data::Store& found = self.get();
                               const GilReleased released;
                               return found.slots_exchanged();
                             })
      .def("reader", &make_store_reader, py::kw_only(), py::arg("batch_size"),
           py::arg("drop_last") = defaults.drop_last,
           py::arg("begin_record") = defaults.begin_record, py::arg("threads") = defaults.threads,
           py::arg("buffer_bytes") = defaults.buffer_bytes, py::arg("seed") = py::none())
      .def("checksum", &checksum)
      .def("bad_lines", &bad_lines)
      .def("notices", &notices)
      .def("command_notices", &command_notices)
      .def("release", [](const StoreHolder& self) { self.get().release(); }, no_gil());
  bind_feeding(store);
}

}  // namespace cpudist::bind
