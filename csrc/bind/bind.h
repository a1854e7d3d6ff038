// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The parts of the Python module _core. No torch header: the module works with every build of
// torch.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/types.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "bind/gil.h"

namespace cpudist::bind {

namespace py = pybind11;

void bind_errors(py::module_& module);
void bind_layout(py::module_& module);
void bind_network(py::module_& module);
void bind_server(py::module_& module);
void bind_client(py::module_& module);
void bind_data(py::module_& module);
void bind_inference(py::module_& module);
void bind_helpers(py::module_& module);

// Raised as ForkedProcessError.
class ForkedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Owns an object whose threads and sockets belong to the process that made it. A forked child may
// not use it, and leaves it undestroyed: the threads to join are not there.
template <typename T>
class ForkSafe {
 public:
  explicit ForkSafe(std::unique_ptr<T> object) : object_(std::move(object)), pid_(::getpid()) {}
  ~ForkSafe() {
    if (forked()) static_cast<void>(object_.release());
  }
  ForkSafe(const ForkSafe&) = delete;
  ForkSafe& operator=(const ForkSafe&) = delete;

  bool forked() const { return ::getpid() != pid_; }
  T& get(const char* what) const {
    if (forked()) {
      throw ForkedError(std::string(what) + " of process " + std::to_string(pid_) +
                        " used in its forked child " + std::to_string(::getpid()) +
                        "; sockets and threads stay with the parent. Do this there: neither a "
                        "DataLoader worker nor another process that is forked after init() can");
    }
    return *object_;
  }

 private:
  std::unique_ptr<T> object_;
  pid_t pid_;
};

}  // namespace cpudist::bind
