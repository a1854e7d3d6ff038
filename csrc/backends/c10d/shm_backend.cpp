// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The collectives of c10d as calls of backend shm.
#include "backends/c10d/shm_backend.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace cpudist::backends {

using c10d::OpType;
using shm::Kind;

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

WorkPtr ShmBackend::start(OpType type, std::vector<Prepared> calls, Tensors result,
                          std::chrono::milliseconds timeout, bool wait) {
  auto completion = std::make_shared<Completion>(std::move(result), calls.size());
  auto work = c10::make_intrusive<ShmWork>(getRank(), type, group_, completion);
  for (Prepared& one : calls) {
    ++calls_;
    shm::Submission submission;
    submission.call = std::move(one.call);
    submission.timeout = timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
    submission.wait = wait;
    submission.finish = [held = std::move(one.held)] { held.finish(); };
    submission.notify = [completion](std::exception_ptr error) { completion->ended(error); };
    work->add(group_->engine.submit(std::move(submission)));
  }
  return work;
}

WorkPtr ShmBackend::start(OpType type, Prepared call, Tensors result,
                          std::chrono::milliseconds timeout, bool wait) {
  std::vector<Prepared> calls;
  calls.push_back(std::move(call));
  return start(type, std::move(calls), std::move(result), timeout, wait);
}

WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only(tensors);
  Prepared one;
  one.call.kind = Kind::kBroadcast;
  one.call.root = static_cast<int>(opts.rootRank);
  describe(one.call, tensor);
  one.call.in = one.call.out = one.held.out(tensor);
  return start(OpType::BROADCAST, std::move(one), tensors, opts.timeout, !opts.asyncOp);
}

WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (only(tensors).layout() == at::kSparse) return allreduce_sparse(tensors, opts);
  Prepared one;
  one.call.kind = Kind::kAllReduce;
  describe(one.call, tensors[0], opts.reduceOp);
  one.call.in = one.call.out = one.held.out(tensors[0]);
  return start(OpType::ALLREDUCE, std::move(one), tensors, opts.timeout, !opts.asyncOp);
}

WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors,
                                        const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<Prepared> calls;
  for (const at::Tensor& tensor : tensors) {
    Prepared& one = calls.emplace_back();
    one.call.kind = Kind::kAllReduce;
    describe(one.call, tensor, opts.reduceOp);
    one.call.in = one.call.out = one.held.out(tensor);
  }
  return start(OpType::ALLREDUCE_COALESCED, std::move(calls), tensors, opts.timeout, !opts.asyncOp);
}

at::Tensor ShmBackend::gathered(const at::Tensor& tensor, std::chrono::milliseconds timeout) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), getSize());
  at::Tensor all = at::empty(shape, tensor.options());
  start(OpType::_ALLGATHER_BASE, gather_base(all, tensor), {all}, timeout, true);
  return all;
}

// Rows of all ranks, summed; in the caller's thread, since each step needs the one before.
WorkPtr ShmBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (opts.reduceOp.op_ != c10d::ReduceOp::SUM) {
    refuse("expected SUM, which is all that sparse tensors have");
  }
  at::Tensor& tensor = tensors[0];
  const at::Tensor own = tensor.coalesce();
  const at::Tensor counts = gathered(at::full({1}, own._nnz(), at::kLong), opts.timeout);
  const int64_t most = counts.max().item<int64_t>();
  at::Tensor indices = at::zeros({own.sparse_dim(), most}, at::kLong);
  indices.narrow(1, 0, own._nnz()).copy_(own.indices());
  std::vector<int64_t> shape = own.values().sizes().vec();
  shape[0] = most;
  at::Tensor values = at::zeros(shape, own.values().options());
  values.narrow(0, 0, own._nnz()).copy_(own.values());
  const at::Tensor all_indices = gathered(indices, opts.timeout);
  const at::Tensor all_values = gathered(values, opts.timeout);
  std::vector<at::Tensor> index_parts, value_parts;
  for (int rank = 0; rank < getSize(); ++rank) {
    const int64_t count = counts[rank].item<int64_t>();
    index_parts.push_back(all_indices[rank].narrow(1, 0, count));
    value_parts.push_back(all_values[rank].narrow(0, 0, count));
  }
  const at::Tensor sum = at::sparse_coo_tensor(at::cat(index_parts, 1), at::cat(value_parts, 0),
                                               own.sizes(), own.options())
                             .coalesce();
  tensor.copy_(sum);
  return start(OpType::_ALLREDUCE_SPARSE, std::vector<Prepared>{}, {tensor}, opts.timeout, true);
}

WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only(tensors);
  Prepared one;
  one.call.kind = Kind::kReduce;
  one.call.root = static_cast<int>(opts.rootRank);
  describe(one.call, tensor, opts.reduceOp);
  if (getRank() == opts.rootRank) {
    one.call.in = one.call.out = one.held.out(tensor);
  } else {
    one.call.in = one.held.in(tensor);
  }
  return start(OpType::REDUCE, std::move(one), tensors, opts.timeout, !opts.asyncOp);
}

ShmBackend::Prepared ShmBackend::gather_call(const Tensors& outputs, const at::Tensor& input,
                                             Kind kind) {
  Prepared one;
  one.call.kind = kind;
  describe(one.call, input);
  one.call.in = one.held.in(input);
  for (const at::Tensor& output : outputs) one.call.outs.push_back(one.held.out(output));
  return one;
}

WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) {
  if (outputs.size() != 1) refuse("expected one list of outputs");
  check_list(outputs[0], only(inputs), getSize());
  return start(OpType::ALLGATHER, gather_call(outputs[0], inputs[0], Kind::kAllGather), outputs[0],
               opts.timeout, !opts.asyncOp);
}

WorkPtr ShmBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& opts) {
  std::vector<Prepared> calls;
  Tensors result;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_ranks;
    for (const Tensors& of_rank : outputs) of_ranks.push_back(of_rank.at(i));
    check_list(of_ranks, inputs[i], getSize());
    calls.push_back(gather_call(of_ranks, inputs[i], Kind::kAllGather));
    result.insert(result.end(), of_ranks.begin(), of_ranks.end());
  }
  return start(OpType::ALLGATHER_COALESCED, std::move(calls), result, opts.timeout, !opts.asyncOp);
}

ShmBackend::Prepared ShmBackend::gather_base(const at::Tensor& output, const at::Tensor& input) {
  check_flat(output, input, getSize());
  Prepared one;
  one.call.kind = Kind::kAllGather;
  describe(one.call, input);
  one.call.in = one.held.in(input);
  auto* out = static_cast<std::byte*>(one.held.out(output));
  for (int rank = 0; rank < getSize(); ++rank) {
    one.call.outs.push_back(out + static_cast<size_t>(rank) * input.nbytes());
  }
  return one;
}

WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                    const c10d::AllgatherOptions& opts) {
  return start(OpType::_ALLGATHER_BASE, gather_base(output, input), {output}, opts.timeout,
               !opts.asyncOp);
}

WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  if (outputs.size() != inputs.size()) refuse("expected as many outputs as inputs");
  std::vector<Prepared> calls;
  for (size_t i = 0; i < inputs.size(); ++i) calls.push_back(gather_base(outputs[i], inputs[i]));
  return start(OpType::COALESCED, std::move(calls), outputs, opts.timeout, !opts.asyncOp);
}

WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const bool is_root = getRank() == opts.rootRank;
  if (outputs.size() != (is_root ? 1 : 0)) {
    refuse("gather: expected one list of outputs on the root, and none elsewhere");
  }
  if (is_root) check_list(outputs[0], only(inputs), getSize());
  const Tensors result = is_root ? outputs[0] : Tensors{};
  Prepared one = gather_call(result, only(inputs), Kind::kGather);
  one.call.root = static_cast<int>(opts.rootRank);
  return start(OpType::GATHER, std::move(one), result, opts.timeout, !opts.asyncOp);
}

WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                            const c10d::ScatterOptions& opts) {
  const bool is_root = getRank() == opts.rootRank;
  if (inputs.size() != (is_root ? 1 : 0)) {
    refuse("scatter: expected one list of inputs on the root, and none elsewhere");
  }
  Prepared one;
  one.call.kind = Kind::kScatter;
  one.call.root = static_cast<int>(opts.rootRank);
  describe(one.call, only(outputs));
  if (is_root) {
    check_list(inputs[0], outputs[0], getSize());
    for (const at::Tensor& input : inputs[0]) one.call.ins.push_back(one.held.in(input));
  }
  one.call.out = one.held.out(outputs[0]);
  return start(OpType::SCATTER, std::move(one), outputs, opts.timeout, !opts.asyncOp);
}

WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                   const c10d::ReduceScatterOptions& opts) {
  if (inputs.size() != 1) refuse("expected one list of inputs");
  check_list(inputs[0], only(outputs), getSize());
  Prepared one;
  one.call.kind = Kind::kReduceScatter;
  describe(one.call, outputs[0], opts.reduceOp);
  for (const at::Tensor& input : inputs[0]) one.call.ins.push_back(one.held.in(input));
  one.call.out = one.held.out(outputs[0]);
  return start(OpType::REDUCE_SCATTER, std::move(one), outputs, opts.timeout, !opts.asyncOp);
}

ShmBackend::Prepared ShmBackend::scatter_base(const at::Tensor& output, const at::Tensor& input,
                                              const c10d::ReduceOp& op) {
  check_flat(input, output, getSize());
  Prepared one;
  one.call.kind = Kind::kReduceScatter;
  describe(one.call, output, op);
  const auto* in = static_cast<const std::byte*>(one.held.in(input));
  for (int rank = 0; rank < getSize(); ++rank) {
    one.call.ins.push_back(in + static_cast<size_t>(rank) * output.nbytes());
  }
  one.call.out = one.held.out(output);
  return one;
}

WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& opts) {
  return start(OpType::_REDUCE_SCATTER_BASE, scatter_base(output, input, opts.reduceOp), {output},
               opts.timeout, !opts.asyncOp);
}

WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != inputs.size()) refuse("expected as many outputs as inputs");
  std::vector<Prepared> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back(scatter_base(outputs[i], inputs[i], opts.reduceOp));
  }
  return start(OpType::REDUCE_SCATTER_TENSOR_COALESCED, std::move(calls), outputs, opts.timeout,
               !opts.asyncOp);
}

WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_sizes,
                                  Sizes& input_sizes, const c10d::AllToAllOptions& opts) {
  const auto split = [&](const at::Tensor& tensor, const Sizes& sizes) {
    const int64_t rows = tensor.dim() == 0 ? 0 : tensor.size(0);
    if (sizes.empty() && rows % getSize() == 0) return Sizes(getSize(), rows / getSize());
    if (sizes.size() != static_cast<size_t>(getSize()) ||
        std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; }) ||
        std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) != rows) {
      refuse("all_to_all: expected split sizes, one for each rank, that add up to " +
             std::to_string(rows) + " rows");
    }
    return sizes;
  };
  if (output.scalar_type() != input.scalar_type()) refuse("all_to_all: expected one dtype");
  Prepared one;
  one.call.kind = Kind::kAllToAll;
  const auto row_bytes = [](const at::Tensor& tensor) {
    const int64_t rows = tensor.dim() == 0 ? 0 : tensor.size(0);
    return rows == 0 ? size_t{0} : tensor.nbytes() / static_cast<size_t>(rows);
  };
  const auto* in = static_cast<const std::byte*>(one.held.in(input));
  for (const int64_t rows : split(input, input_sizes)) {
    one.call.ins.push_back(in);
    one.call.in_bytes.push_back(static_cast<size_t>(rows) * row_bytes(input));
    in += one.call.in_bytes.back();
  }
  auto* out = static_cast<std::byte*>(one.held.out(output));
  for (const int64_t rows : split(output, output_sizes)) {
    one.call.outs.push_back(out);
    one.call.out_bytes.push_back(static_cast<size_t>(rows) * row_bytes(output));
    out += one.call.out_bytes.back();
  }
  return start(OpType::ALLTOALL_BASE, std::move(one), {output}, opts.timeout, !opts.asyncOp);
}

WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const auto size = static_cast<size_t>(getSize());
  if (outputs.size() != size || inputs.size() != size) {
    refuse("all_to_all: expected lists of " + std::to_string(size) + " tensors");
  }
  Prepared one;
  one.call.kind = Kind::kAllToAll;
  for (const at::Tensor& input : inputs) {
    one.call.ins.push_back(one.held.in(input));
    one.call.in_bytes.push_back(input.nbytes());
  }
  for (const at::Tensor& output : outputs) {
    one.call.outs.push_back(one.held.out(output));
    one.call.out_bytes.push_back(output.nbytes());
  }
  return start(OpType::ALLTOALL, std::move(one), outputs, opts.timeout, !opts.asyncOp);
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& opts) {
  return start(OpType::BARRIER, Prepared{}, {}, opts.timeout, !opts.asyncOp);
}

WorkPtr ShmBackend::message(OpType type, bool sends, const at::Tensor& tensor, int peer, int tag) {
  check_tag(tag);
  const bool any = peer == shm::kAnySource && !sends;
  if (any && getSize() == 1) refuse("a group of one rank has nobody to receive from");
  if (peer >= getSize() || (peer < 0 && !any)) {
    refuse("expected a rank below " + std::to_string(getSize()) + ", found " +
           std::to_string(peer));
  }
  Held held;
  auto one = std::make_shared<shm::Message>();
  one->sends = sends;
  one->peer = peer;
  one->tag = tag;
  one->data = sends ? static_cast<std::byte*>(const_cast<void*>(held.in(tensor)))
                    : static_cast<std::byte*>(held.out(tensor));
  one->size_bytes = tensor.nbytes();
  one->dtype = dtype_of(tensor.scalar_type());
  one->timeout = timeout_;
  auto completion = std::make_shared<Completion>(Tensors{tensor}, 1);
  one->finish = [held = std::move(held)] { held.finish(); };
  one->notify = [completion](std::exception_ptr error) { completion->ended(error); };
  auto work = c10::make_intrusive<ShmWork>(getRank(), type, group_, completion);
  work->set(one);
  group_->messages.submit(one);
  return work;
}

WorkPtr ShmBackend::send(Tensors& tensors, int peer, int tag) {
  return message(OpType::SEND, true, only(tensors), peer, tag);
}

WorkPtr ShmBackend::recv(Tensors& tensors, int peer, int tag) {
  return message(OpType::RECV, false, only(tensors), peer, tag);
}

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(OpType::RECVANYSOURCE, false, only(tensors), shm::kAnySource, tag);
}

at::Tensor ShmBackend::empty(int64_t numel, at::ScalarType dtype) {
  if (numel < 0) refuse("expected a number of elements, found " + std::to_string(numel));
  const auto options = at::TensorOptions().dtype(dtype);
  const size_t size_bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  auto buffer = group_->engine.allocate(size_bytes, timeout_);
  void* data = buffer->own();
  return at::from_blob(data, {numel}, [buffer = std::move(buffer)](void*) {}, options);
}

}  // namespace cpudist::backends
