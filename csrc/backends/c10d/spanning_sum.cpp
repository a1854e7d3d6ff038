// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Reductions over several hosts: to the first rank of each, between those over gloo, and back.
// gloo has no int16 and sums in the type it is given, so that averages of integers, which are
// exact, travel as what their sums fit in.
#include "backends/c10d/spanning_backend.h"

namespace cpudist::backends {

using c10d::ReduceOp;

namespace {

// Booleans are or-ed and and-ed as bytes, as inside a host.
ReduceOp op_between(const ReduceOp& op, bool truth) {
  if (!truth) return op;
  if (op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::MAX) return ReduceOp::BOR;
  if (op.op_ == ReduceOp::PRODUCT || op.op_ == ReduceOp::MIN) return ReduceOp::BAND;
  return op;
}

// What a rank adds for an average of integers of `n` ranks. There is nothing wider than int64:
// those are quotients and rests of a division by n, whose sums both fit.
at::Tensor terms_of(const at::Tensor& tensor, int64_t n) {
  if (tensor.element_size() <= 2) return tensor.to(at::kInt);
  if (tensor.element_size() == 4) return tensor.to(at::kLong);
  const at::Tensor quotients = tensor.div(n, "trunc");
  return at::stack({quotients, tensor - quotients * n});
}

// The average, towards zero, of tensors of `type` whose terms sum up to `sums`.
at::Tensor average_of(const at::Tensor& sums, at::ScalarType type, int64_t n) {
  if (type != at::kLong) return sums.div(n, "trunc");
  const at::Tensor carried = sums[1].div(n, "trunc");
  const at::Tensor rest = sums[1] - carried * n;
  const at::Tensor average = sums[0] + carried;
  // A rest of the other sign has taken the quotient one too far from zero.
  const at::Tensor beyond = average.sign() * rest.sign() < 0;
  return average - average.sign() * beyond;
}

}  // namespace

void SpanningBackend::sum_between(const at::Tensor& tensor, const ReduceOp& op,
                                  Milliseconds limit) {
  const bool truth = tensor.scalar_type() == at::kBool;
  const bool narrow = tensor.scalar_type() == at::kShort;
  c10d::AllreduceOptions options;
  options.reduceOp = op_between(op, truth);
  options.timeout = limit;
  Tensors flat{truth ? bytes_of(tensor) : tensor.flatten()};
  if (narrow) flat[0] = flat[0].to(at::kInt);
  wait_between(between_->allreduce(flat, options), limit);
  if (narrow) tensor.copy_(flat[0].view(tensor.sizes()));
}

void SpanningBackend::sum(const at::Tensor& tensor, const ReduceOp& op, Milliseconds limit) {
  const bool average = op.op_ == ReduceOp::AVG;
  const bool exact = average && !tensor.is_floating_point();
  const ReduceOp plain = average ? ReduceOp(ReduceOp::SUM) : op;
  const at::Tensor terms = exact ? terms_of(tensor, size_) : tensor;
  Tensors one{terms}, result{tensor};
  c10d::ReduceOptions inside;
  inside.reduceOp = plain;
  inside.timeout = limit;
  inside.asyncOp = false;
  local_->reduce(one, inside);
  if (leads()) {
    sum_between(terms, plain, limit);
    if (exact) {
      tensor.copy_(average_of(terms, tensor.scalar_type(), size_));
    } else if (average) {
      tensor.div_(size_);
    }
  }
  c10d::BroadcastOptions back;
  back.timeout = limit;
  back.asyncOp = false;
  local_->broadcast(result, back);
}

}  // namespace cpudist::backends
