// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Collectives that gain nothing from shared memory: over gloo of all ranks. gloo pairs collectives
// by the order in which they begin, so all of them begin in the serial order.
#include <numeric>
#include <utility>

#include "backends/c10d/spanning_backend.h"

namespace cpudist::backends {

using c10d::OpType;

WorkPtr SpanningBackend::start_everywhere(OpType type, Tensors result, Milliseconds timeout,
                                          Begin begin, bool wait) {
  const auto job = [this, begin = std::move(begin), limit = limit_of(timeout)] {
    wait_between(begin(limit), limit);
  };
  return start(type, std::move(result), job, wait);
}

WorkPtr SpanningBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto begin = [this, tensors, plain = opts](Milliseconds limit) mutable {
    plain.timeout = limit;
    return everyone_->allreduce(tensors, plain);
  };
  return start_everywhere(OpType::_ALLREDUCE_SPARSE, tensors, opts.timeout, begin, !opts.asyncOp);
}

WorkPtr SpanningBackend::gather(TensorLists& outputs, Tensors& inputs,
                                const c10d::GatherOptions& opts) {
  const auto begin = [this, outputs, inputs, plain = opts](Milliseconds limit) mutable {
    plain.timeout = limit;
    return everyone_->gather(outputs, inputs, plain);
  };
  return start_everywhere(OpType::GATHER, outputs.empty() ? Tensors{} : outputs[0], opts.timeout,
                          begin, !opts.asyncOp);
}

WorkPtr SpanningBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                 const c10d::ScatterOptions& opts) {
  const auto begin = [this, outputs, inputs, plain = opts](Milliseconds limit) mutable {
    plain.timeout = limit;
    return everyone_->scatter(outputs, inputs, plain);
  };
  return start_everywhere(OpType::SCATTER, outputs, opts.timeout, begin, !opts.asyncOp);
}

WorkPtr SpanningBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_sizes,
                                       Sizes& input_sizes, const c10d::AllToAllOptions& opts) {
  const auto begin = [this, output, input, output_sizes, input_sizes,
                      plain = opts](Milliseconds limit) mutable {
    plain.timeout = limit;
    return everyone_->alltoall_base(output, input, output_sizes, input_sizes, plain);
  };
  return start_everywhere(OpType::ALLTOALL_BASE, {output}, opts.timeout, begin, !opts.asyncOp);
}

// As bytes of one tensor, which is what gloo has.
WorkPtr SpanningBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                  const c10d::AllToAllOptions& opts) {
  const auto job = [this, outputs, inputs, limit = limit_of(opts.timeout)] {
    const auto sizes_of = [](const Tensors& tensors) {
      Sizes sizes;
      for (const at::Tensor& one : tensors) sizes.push_back(static_cast<int64_t>(one.nbytes()));
      return sizes;
    };
    Tensors flat;
    for (const at::Tensor& input : inputs) flat.push_back(bytes_of(input.contiguous()));
    at::Tensor in = at::cat(flat);
    const Sizes parts_of_out = sizes_of(outputs);
    Sizes in_sizes = sizes_of(inputs), out_sizes = parts_of_out;  // gloo takes them away
    const int64_t total = std::accumulate(parts_of_out.begin(), parts_of_out.end(), int64_t{0});
    at::Tensor out = at::empty({total}, at::kByte);
    c10d::AllToAllOptions plain;
    plain.timeout = limit;
    wait_between(everyone_->alltoall_base(out, in, out_sizes, in_sizes, plain), limit);
    const auto parts = out.split_with_sizes(parts_of_out);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const at::Tensor part = parts[i].clone().view(outputs[i].scalar_type());
      at::Tensor(outputs[i]).copy_(part.view(outputs[i].sizes()));
    }
  };
  return start(OpType::ALLTOALL, outputs, job, !opts.asyncOp);
}

}  // namespace cpudist::backends
