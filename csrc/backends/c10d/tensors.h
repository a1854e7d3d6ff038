// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors as the calls of backend shm see them: addresses, counts, dtypes.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>

#include "backends/shm/reduce/reduce.h"
#include "backends/shm/types.h"
#include "base/errors.h"

namespace cpudist::backends {

[[noreturn]] inline void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "backend shm: " + what);
}

// For bytes that are only moved.
inline shm::DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return shm::DType::kF32;
    case at::kDouble:
      return shm::DType::kF64;
    case at::kBFloat16:
      return shm::DType::kBf16;
    case at::kHalf:
      return shm::DType::kF16;
    case at::kChar:
      return shm::DType::kI8;
    case at::kByte:
    case at::kBool:
      return shm::DType::kU8;
    case at::kShort:
      return shm::DType::kI16;
    case at::kInt:
      return shm::DType::kI32;
    case at::kLong:
      return shm::DType::kI64;
    default:
      return shm::DType::kBytes;
  }
}

// Sets dtype and count of `tensor`.
inline void describe(shm::Call& call, const at::Tensor& tensor) {
  call.dtype = dtype_of(tensor.scalar_type());
  const auto numel = static_cast<size_t>(tensor.numel());
  call.count = call.dtype == shm::DType::kBytes ? numel * tensor.element_size() : numel;
}

inline shm::Reduction reduction_of(c10d::ReduceOp::RedOpType op, bool truth) {
  using c10d::ReduceOp;
  using shm::Reduction;
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::MAX:
      if (truth) return Reduction::kOr;
      return op == ReduceOp::SUM ? Reduction::kSum : Reduction::kMax;
    case ReduceOp::PRODUCT:
    case ReduceOp::MIN:
      if (truth) return Reduction::kAnd;
      return op == ReduceOp::MIN ? Reduction::kMin : Reduction::kProduct;
    case ReduceOp::AVG:
      if (!truth) return Reduction::kSum;
      break;
    case ReduceOp::BAND:
      return Reduction::kAnd;
    case ReduceOp::BOR:
      return Reduction::kOr;
    case ReduceOp::BXOR:
      return Reduction::kXor;
    default:
      break;
  }
  refuse("expected SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, and no AVG of booleans");
}

// Sets dtype, count and reduction. Booleans are or-ed (SUM, MAX) and and-ed (PRODUCT, MIN).
inline void describe(shm::Call& call, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  describe(call, tensor);
  if (call.dtype == shm::DType::kBytes) {
    refuse(std::string("expected a dtype that can be reduced, found ") +
           c10::toString(tensor.scalar_type()));
  }
  call.reduction = reduction_of(op.op_, tensor.scalar_type() == at::kBool);
  call.average = op.op_ == c10d::ReduceOp::AVG;
  shm::check_reducible(call.dtype, call.reduction, call.average);
}

// Throws what a call that reduces `tensor` would, before it has begun.
inline void check_reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  shm::Call call;
  describe(call, tensor, op);
}

}  // namespace cpudist::backends
