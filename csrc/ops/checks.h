// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Argument checks and tensor access shared by the ops. Messages name the op, the argument, the
// rule and what was found.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <sstream>
#include <stdexcept>

namespace cpudist::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

inline void require_cpu(const Tensor& tensor, const char* op, const char* name) {
  require(tensor.is_cpu(), op, ": ", name, " must be on the CPU");
}

inline void require_dim(const Tensor& tensor, int64_t dim, const char* op, const char* name) {
  require(tensor.dim() == dim, op, ": ", name, " must have ", dim, " dimensions, got ",
          tensor.dim());
}

inline void require_dtype(const Tensor& tensor, ScalarType dtype, const char* expected,
                          const char* op, const char* name) {
  require(tensor.scalar_type() == dtype, op, ": ", name, " must be ", expected, ", got dtype code ",
          static_cast<int>(tensor.scalar_type()));
}

inline void require_keys(const Tensor& tensor, const char* op, const char* name) {
  require_cpu(tensor, op, name);
  require_dim(tensor, 1, op, name);
  require_dtype(tensor, ScalarType::Long, "int64", op, name);
}

inline void require_real(const Tensor& tensor, const char* op, const char* name) {
  require_cpu(tensor, op, name);
  const ScalarType dtype = tensor.scalar_type();
  require(dtype == ScalarType::Float || dtype == ScalarType::Double, op, ": ", name,
          " must be float32 or float64, got dtype code ", static_cast<int>(dtype));
}

inline void require_mutable(const Tensor& tensor, const char* op, const char* name) {
  require(tensor.is_contiguous(), op, ": ", name, " is written to and must be contiguous");
}

inline void require_size(int64_t found, int64_t expected, const char* op, const char* what) {
  require(found == expected, op, ": ", what, " must be ", expected, ", got ", found);
}

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> size,
                         ScalarType dtype) {
  return torch::stable::new_empty(like, {size.begin(), size.size()}, dtype);
}

}  // namespace cpudist::ops
