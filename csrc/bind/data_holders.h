// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What Python holds of schemas, readers and stores of data, and what their bindings share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "data/read/reader.h"
#include "data/store/store.h"

namespace cpudist::bind {

// (name, "int" or "float", dim, hash_range, missing, used, columns, sparse)
using SlotArgument = std::tuple<std::string, std::string, uint32_t, uint64_t, py::object, bool,
                                std::vector<std::string>, bool>;
using LaneArgument = std::vector<std::tuple<uint32_t, uint64_t, uint64_t>>;

// A schema, and the memory of batches that are read by it, which one epoch leaves to the next.
struct DataSchema {
  data::Schema schema;
  std::shared_ptr<data::BatchPool> pool = data::BatchPool::create();
};

// A batch with the position after it, as Python is to see that.
struct DataBatch {
  std::shared_ptr<data::Batch> batch;
  bool has_instance_ids = false;
  py::object position;
};

inline const double kCommandTimeoutS = data::Command{}.timeout_s;

// Owns a T with threads; they are joined without the GIL.
template <typename T>
class DataHolder {
 public:
  DataHolder(std::unique_ptr<T> object, const char* what)
      : what_(what), object_(std::make_unique<std::unique_ptr<T>>(std::move(object))) {}
  ~DataHolder() {
    if (object_.forked()) return;
    const GilReleased no_gil;
    object_.get(what_).reset();
  }
  DataHolder(const DataHolder&) = delete;
  DataHolder& operator=(const DataHolder&) = delete;
  T& get() const { return *object_.get(what_); }

 private:
  const char* what_;
  ForkSafe<std::unique_ptr<T>> object_;
};

// Python has one for each class of its own.
struct ReaderHolder : DataHolder<data::Reader> {
  using DataHolder::DataHolder;
};
struct StoreReaderHolder : DataHolder<data::StoreReader> {
  using DataHolder::DataHolder;
};
struct StoreHolder : DataHolder<data::Store> {
  StoreHolder(std::unique_ptr<data::Store> store, std::shared_ptr<data::BatchPool> its_pool)
      : DataHolder(std::move(store), "DataStore"), pool(std::move(its_pool)) {}
  const std::shared_ptr<data::BatchPool> pool;
};

// Signals are looked for in the main thread only: others never get any.
data::Wait python_wait(double timeout_s);
// The same, and calls `tell`, unless it is None, once there are notices.
data::Wait python_wait(double timeout_s, const data::Notices& notices, const py::object& tell);

data::Input make_input(std::vector<std::string> files, const py::object& command,
                       double command_timeout_s, bool fed, uint64_t line_limit_bytes);
std::vector<std::vector<data::Split>> make_lanes(const std::vector<LaneArgument>& lanes);
data::BadLinePolicy make_policy(const std::string& name);
std::string path_or_none(const py::object& path);
py::dict bad_line_counts(data::BadLines& bad_lines);

// How lanes are fed; `feeds` may be null: nothing is read any more, and all return False.
bool feed_bytes(data::Feeds* feeds, uint64_t lane, const py::buffer& bytes);
bool feed_columns(data::Feeds* feeds, uint64_t lane, uint64_t records, const py::list& columns);
bool feed_end_of_file(data::Feeds* feeds, uint64_t lane);
bool feed_failure(data::Feeds* feeds, uint64_t lane, const std::string& message);

void bind_data_command(py::module_& module);
void bind_data_store(py::module_& module);
void bind_data_shuffle(py::module_& module);

}  // namespace cpudist::bind
