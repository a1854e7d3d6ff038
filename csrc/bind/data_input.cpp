// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Arguments of readers and loads of data, and how Python threads feed them.
#include <pybind11/numpy.h>
#include <sys/syscall.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/data_holders.h"

namespace cpudist::bind {

namespace {

bool signal_pending() {
  const GilTaken gil;
  return PyErr_CheckSignals() != 0;
}

template <typename T>
std::span<const T> values_of(const py::handle& object, const char* dtype, const std::string& what) {
  if (!py::isinstance<py::array_t<T>>(object)) {
    throw Error(ErrorCode::kInvalidArgument, what + ": expected a numpy array of " + dtype);
  }
  const auto array = py::reinterpret_borrow<py::array>(object);
  if ((array.flags() & py::array::c_style) == 0) {
    throw Error(ErrorCode::kInvalidArgument, what + ": expected a contiguous array");
  }
  return {static_cast<const T*>(array.data()), static_cast<size_t>(array.size())};
}

data::ColumnValues column_of(const py::handle& object, size_t index) {
  const std::string what = "column " + std::to_string(index);
  const auto pair = py::cast<py::sequence>(object);
  if (pair.size() != 2) {
    throw Error(ErrorCode::kInvalidArgument, what + ": expected (values, offsets or None)");
  }
  const py::object values = pair[0];
  const py::object offsets = pair[1];
  data::ColumnValues column;
  if (py::isinstance<py::array_t<float>>(values)) {
    column.floats = values_of<float>(values, "float32", what);
  } else {
    column.ints = values_of<int64_t>(values, "int64 or float32", what);
  }
  if (!offsets.is_none()) column.offsets = values_of<int64_t>(offsets, "int64", what + ", offsets");
  return column;
}

}  // namespace

data::Wait python_wait(double timeout_s) {
  data::Wait wait;
  wait.timeout_s = timeout_s;
  if (::syscall(SYS_gettid) == ::getpid()) wait.interrupted = &signal_pending;
  return wait;
}

// Looks without the GIL, and takes it to tell only.
data::Wait python_wait(double timeout_s, const data::Notices& notices, const py::object& tell) {
  data::Wait wait = python_wait(timeout_s);
  if (tell.is_none()) return wait;
  wait.interrupted = [&notices, raw = tell.ptr(), also = std::move(wait.interrupted)] {
    if (notices.any()) {
      with_gil([raw] { py::reinterpret_borrow<py::object>(raw)(); });
    }
    return also && also();
  };
  return wait;
}

data::Input make_input(std::vector<std::string> files, const py::object& command,
                       double command_timeout_s, bool fed, uint64_t line_limit_bytes) {
  data::Input input;
  input.files = std::move(files);
  input.command = {path_or_none(command), command_timeout_s};
  input.fed = fed;
  input.line_limit_bytes = line_limit_bytes;
  return input;
}

std::vector<std::vector<data::Split>> make_lanes(const std::vector<LaneArgument>& lanes) {
  std::vector<std::vector<data::Split>> result;
  for (const LaneArgument& lane : lanes) {
    result.emplace_back();
    for (const auto& [file, begin, end] : lane) result.back().push_back({file, begin, end});
  }
  return result;
}

data::BadLinePolicy make_policy(const std::string& name) {
  if (name == "raise") return data::BadLinePolicy::kRaise;
  if (name == "skip") return data::BadLinePolicy::kSkip;
  if (name == "quarantine") return data::BadLinePolicy::kQuarantine;
  throw Error(ErrorCode::kInvalidArgument,
              "policy: expected 'raise', 'skip' or 'quarantine', found '" + name + "'");
}

std::string path_or_none(const py::object& path) {
  return path.is_none() ? std::string() : path.cast<std::string>();
}

py::dict bad_line_counts(data::BadLines& bad_lines) {
  const auto counts = [&] {
    const GilReleased no_gil;
    return bad_lines.counts();
  }();
  py::dict result;
  for (const auto& [file, count] : counts) result[py::int_(file)] = count;
  return result;
}

// Feeders wait as long as consumers take: they are ended by stop(), not by a deadline.
constexpr double kFeedTimeoutS = 3.0e7;

bool feed_bytes(data::Feeds* feeds, uint64_t lane, const py::buffer& bytes) {
  const py::buffer_info info = bytes.request();
  const py::ssize_t step = info.ndim == 1 ? info.strides[0] : -1;
  if (step != info.itemsize && info.size > 1) {
    throw Error(ErrorCode::kInvalidArgument, "feed: expected contiguous bytes");
  }
  if (feeds == nullptr) return false;
  const data::Wait wait = python_wait(kFeedTimeoutS);
  const GilReleased no_gil;
  return feeds->bytes(
      lane, {static_cast<const char*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)},
      wait);
}

bool feed_columns(data::Feeds* feeds, uint64_t lane, uint64_t records, const py::list& columns) {
  std::vector<data::ColumnValues> values;
  for (size_t i = 0; i < columns.size(); ++i) values.push_back(column_of(columns[i], i));
  if (feeds == nullptr) return false;
  const data::Wait wait = python_wait(kFeedTimeoutS);
  const GilReleased no_gil;
  return feeds->columns(lane, records, values, wait);
}

bool feed_end_of_file(data::Feeds* feeds, uint64_t lane) {
  if (feeds == nullptr) return false;
  const data::Wait wait = python_wait(kFeedTimeoutS);
  const GilReleased no_gil;
  return feeds->end_of_file(lane, wait);
}

bool feed_failure(data::Feeds* feeds, uint64_t lane, const std::string& message) {
  if (feeds == nullptr) return false;
  const data::Wait wait = python_wait(kFeedTimeoutS);
  const GilReleased no_gil;
  return feeds->failure(lane, message, wait);
}

}  // namespace cpudist::bind
