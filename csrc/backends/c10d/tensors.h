// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors as the calls of backend shm see them: addresses, counts, dtypes.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <utility>
#include <vector>

#include "backends/shm/reduce/reduce.h"
#include "backends/shm/types.h"
#include "base/errors.h"

namespace cpudist::backends {

[[noreturn]] inline void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "backend shm: " + what);
}

inline void check_tensor(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu()) {
    refuse("expected a tensor on cpu, found one on " + tensor.device().str() +
           "; use nccl for CUDA tensors");
  }
  if (tensor.layout() != at::kStrided) {
    refuse("expected a dense tensor, found a sparse one; only all_reduce takes those");
  }
}

inline const at::Tensor& only(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1) {
    refuse("expected one tensor, found " + std::to_string(tensors.size()));
  }
  return tensors[0];
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

inline void check_tag(int tag) {
  if (tag < 0) refuse("expected a tag of 0 or more, found " + std::to_string(tag));
}

// Throws what a call that reduces `tensor` would, before it has begun.
inline void check_reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  check_tensor(tensor);
  shm::Call call;
  describe(call, tensor, op);
}

// Tensors that a call reads or writes: the user's where they are contiguous, else copies, which
// finish() copies back to those that are written. Keeps all alive. A view that conjugates or
// negates when it is read is copied, too.
class Held {
 public:
  const at::Tensor& in_tensor(const at::Tensor& tensor) {
    check_tensor(tensor);
    return kept_.emplace_back(plain(tensor));
  }
  const at::Tensor& out_tensor(const at::Tensor& tensor) {
    const at::Tensor& flat = in_tensor(tensor);
    if (!flat.is_same(tensor)) back_.emplace_back(tensor, flat);
    return flat;
  }
  const void* in(const at::Tensor& tensor) { return in_tensor(tensor).const_data_ptr(); }
  void* out(const at::Tensor& tensor) { return out_tensor(tensor).mutable_data_ptr(); }
  void finish() const {
    const at::NoGradGuard no_grad;  // a parameter may be written in any thread
    for (const auto& [target, flat] : back_) at::Tensor(target).copy_(flat);
  }

 private:
  static at::Tensor plain(const at::Tensor& tensor) {
    return tensor.resolve_conj().resolve_neg().contiguous();
  }

  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;
};

// Checks that a list has one tensor for each rank, all of one dtype and size.
inline void check_list(const std::vector<at::Tensor>& tensors, const at::Tensor& like, int size) {
  if (tensors.size() != static_cast<size_t>(size)) {
    refuse("expected a list of " + std::to_string(size) + " tensors, one for each rank, found " +
           std::to_string(tensors.size()));
  }
  for (const at::Tensor& one : tensors) {
    if (one.scalar_type() != like.scalar_type() || one.numel() != like.numel()) {
      refuse("expected tensors of one dtype and size, found " + std::to_string(one.numel()) + " " +
             c10::toString(one.scalar_type()) + " beside " + std::to_string(like.numel()) + " " +
             c10::toString(like.scalar_type()));
    }
  }
}

// Checks that one of two tensors is `times` as large as the other, of one dtype.
inline void check_flat(const at::Tensor& large, const at::Tensor& small, int times) {
  if (large.scalar_type() != small.scalar_type() || large.numel() != small.numel() * times) {
    refuse("expected a tensor of " + std::to_string(small.numel() * times) + " " +
           c10::toString(small.scalar_type()) + ", found " + std::to_string(large.numel()) + " " +
           c10::toString(large.scalar_type()));
  }
}

}  // namespace cpudist::backends
