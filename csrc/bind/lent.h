// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The memory that a Python object lends. Made and let go of with the interpreter's lock held.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace cpudist::bind {

// Contiguous, or Python raises BufferError.
class Lent {
 public:
  explicit Lent(const pybind11::object& data) {
    if (PyObject_GetBuffer(data.ptr(), &view_, PyBUF_SIMPLE) != 0) {
      throw pybind11::error_already_set();
    }
  }
  ~Lent() { PyBuffer_Release(&view_); }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  const void* data() const { return view_.buf; }
  size_t size_bytes() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

}  // namespace cpudist::bind
