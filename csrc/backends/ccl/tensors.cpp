// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What of torch's tensors and reductions oneCCL can take, and in which form.
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include "backends/ccl/backend.h"

namespace cpudist::backends::ccl {

namespace {

using Op = c10d::ReduceOp::RedOpType;

int dtype_of(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kBool:
    case at::kByte:
      return CPUDIST_CCL_UINT8;
    case at::kChar:
      return CPUDIST_CCL_INT8;
    case at::kShort:
      return CPUDIST_CCL_INT16;
    case at::kInt:
      return CPUDIST_CCL_INT32;
    case at::kLong:
      return CPUDIST_CCL_INT64;
    case at::kHalf:
      return CPUDIST_CCL_FLOAT16;
    case at::kFloat:
      return CPUDIST_CCL_FLOAT32;
    case at::kDouble:
      return CPUDIST_CCL_FLOAT64;
    case at::kBFloat16:
      return CPUDIST_CCL_BFLOAT16;
    default:
      TORCH_CHECK_TYPE(
          false, "ccl: ", name, " of ", tensor.scalar_type(),
          " is not supported; expected float16, bfloat16, float32, float64, bool, an ",
          "integer, or (sums) a complex dtype. Convert it, or use gloo for this group");
  }
}

}  // namespace

const char* name_of(c10d::ReduceOp::RedOpType op) {
  static constexpr const char* kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                           "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return op < std::size(kNames) ? kNames[op] : "unknown";
}

const at::Tensor& checked(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "ccl: ", name, " of a ", tensor.layout(),
              " tensor is not supported: exchange its indices and values, or use gloo");
  TORCH_CHECK(tensor.device().is_cpu(), "ccl: ", name, " of a tensor on ", tensor.device(),
              ": expected one on the CPU");
  return tensor;
}

at::Tensor contiguous(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.contiguous();
}

int reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* name) {
  const bool truth = tensor.scalar_type() == at::kBool;
  switch (const Op kind = op) {
    case Op::SUM:
      return truth ? CPUDIST_CCL_MAX : CPUDIST_CCL_SUM;
    case Op::AVG:
      TORCH_CHECK_TYPE(tensor.is_floating_point() || tensor.is_complex(), "ccl: ", name,
                       " with AVG of ", tensor.scalar_type(),
                       ": expected a floating dtype. Use SUM");
      return CPUDIST_CCL_SUM;
    case Op::PRODUCT:
      if (!tensor.is_complex()) return truth ? CPUDIST_CCL_MIN : CPUDIST_CCL_PROD;
      break;
    case Op::MIN:
      if (!tensor.is_complex()) return CPUDIST_CCL_MIN;
      break;
    case Op::MAX:
      if (!tensor.is_complex()) return CPUDIST_CCL_MAX;
      break;
    default:
      if (truth && kind == Op::BAND) return CPUDIST_CCL_MIN;
      if (truth && kind == Op::BOR) return CPUDIST_CCL_MAX;
      break;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "ccl: ", name, " with ", name_of(op), " of ",
                              tensor.scalar_type(), " is not supported by oneCCL. Use gloo or shm");
}

Wire wire_of(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* name) {
  reduction_of(checked(tensor, name), op, name);
  const at::AutoDispatchBelowADInplaceOrView guard;
  Wire wire;
  wire.buffer = contiguous(tensor);
  wire.copied = !wire.buffer.is_same(tensor) || tensor.is_conj();
  if (tensor.is_complex()) wire.buffer = at::view_as_real(wire.buffer.resolve_conj());
  wire.dtype = dtype_of(wire.buffer, name);
  return wire;
}

void write_back(const Wire& wire, const at::Tensor& tensor) {
  if (!wire.copied) return;
  const at::AutoDispatchBelowADInplaceOrView guard;
  tensor.copy_(tensor.is_complex() ? at::view_as_complex(wire.buffer) : wire.buffer);
}

void average(const at::Tensor& sums, const c10d::ReduceOp& op, int size) {
  if (op == Op::AVG) sums.div_(static_cast<double>(size));
}

const at::Tensor& only(const Tensors& tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "ccl: ", name, " takes one tensor, found ",
                    tensors.size());
  return checked(tensors.front(), name);
}

}  // namespace cpudist::backends::ccl
