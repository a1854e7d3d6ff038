// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "backends/c10d/flat_backend.h"

#include <algorithm>
#include <numeric>

namespace cpudist::backends {

using c10d::OpType;

// Results are written into tensors of the user, which may require gradients.
using Untracked = at::AutoDispatchBelowADInplaceOrView;

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor plain(const at::Tensor& tensor) {
  const Untracked untracked;
  return tensor.resolve_conj().resolve_neg().contiguous();
}

void Held::finish() const {
  const at::NoGradGuard no_grad;  // a parameter may be written in any thread
  for (const auto& [target, flat] : back_) at::Tensor(target).copy_(flat);
}

at::Tensor joined(const Parts& parts) {
  if (parts.whole.defined()) return plain(parts.whole);
  const Untracked untracked;
  Tensors flat;
  for (const at::Tensor& tensor : parts.tensors) flat.push_back(plain(tensor).reshape({-1}));
  return at::cat(flat);
}

Room::Room(Parts parts) : parts_(std::move(parts)) {
  const at::Tensor& whole = parts_.whole;
  if (whole.defined()) {
    memory_ = is_plain(whole) ? whole : at::empty(whole.sizes(), whole.options());
    return;
  }
  int64_t count = 0;
  for (const at::Tensor& tensor : parts_.tensors) count += tensor.numel();
  memory_ = at::empty({count}, parts_.tensors[0].options());
}

void Room::settle() const {
  if (memory_.is_same(parts_.whole)) return;
  const Untracked untracked;
  if (parts_.whole.defined()) {
    at::Tensor(parts_.whole).copy_(memory_);
    return;
  }
  int64_t begin = 0;
  for (const at::Tensor& tensor : parts_.tensors) {
    at::Tensor(tensor).copy_(memory_.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

// -- checks

void FlatBackend::refuse(const std::string& what) const {
  throw Error(ErrorCode::kInvalidArgument, std::string(title_) + ": " + what);
}

c10::intrusive_ptr<c10d::Backend::Options> FlatBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout());
}

template <typename CallOptions>
FlatBackend::How FlatBackend::how(OpType type, const char* name, const CallOptions& opts,
                                  Tensors result) {
  ++calls_;
  const Milliseconds limit = opts.timeout == c10d::kUnsetTimeout ? timeout() : opts.timeout;
  return {type, name, limit, !opts.asyncOp, std::move(result)};
}

const at::Tensor& FlatBackend::dense(const How& how, const at::Tensor& tensor) const {
  if (!tensor.device().is_cpu()) {
    refuse(std::string(how.name) + ": expected a tensor on cpu, found one on " +
           tensor.device().str() + "; use nccl for CUDA tensors");
  }
  if (tensor.layout() != at::kStrided) {
    refuse(std::string(how.name) +
           ": expected a dense tensor, found a sparse one; only all_reduce takes those");
  }
  return tensor;
}

const at::Tensor& FlatBackend::only(const How& how, const Tensors& tensors) const {
  if (tensors.size() != 1) {
    refuse(std::string(how.name) + ": expected one tensor, found " +
           std::to_string(tensors.size()));
  }
  return dense(how, tensors[0]);
}

const Tensors& FlatBackend::only(const How& how, const TensorLists& lists, const char* what) const {
  if (lists.size() != 1) refuse(std::string(how.name) + ": expected one list of " + what);
  return lists[0];
}

int FlatBackend::member(const How& how, int64_t rank) const {
  if (rank < 0 || rank >= getSize()) {
    refuse(std::string(how.name) + ": expected a rank below " + std::to_string(getSize()) +
           ", found " + std::to_string(rank));
  }
  return static_cast<int>(rank);
}

// Whether one of two tensors is `times` as large as the other, of one dtype.
void FlatBackend::check_fits(const How& how, const at::Tensor& large, const at::Tensor& small,
                             int64_t times) const {
  if (large.scalar_type() != small.scalar_type()) {
    refuse(std::string(how.name) + ": expected tensors of one dtype, found " +
           c10::toString(large.scalar_type()) + " beside " + c10::toString(small.scalar_type()));
  }
  if (large.numel() != small.numel() * times) {
    refuse(std::string(how.name) + ": " + std::to_string(large.numel()) + " elements do not hold " +
           std::to_string(times) + " x " + std::to_string(small.numel()));
  }
}

void FlatBackend::check_pairs(const How& how, const Tensors& outputs, const Tensors& inputs) const {
  if (outputs.size() != inputs.size()) {
    refuse(std::string(how.name) + ": expected as many outputs as inputs, found " +
           std::to_string(outputs.size()) + " and " + std::to_string(inputs.size()));
  }
}

Parts FlatBackend::parts_like(const How& how, const Tensors& tensors,
                              const at::Tensor& like) const {
  if (tensors.size() != static_cast<size_t>(getSize())) {
    refuse(std::string(how.name) + ": expected a list of " + std::to_string(getSize()) +
           " tensors, one for each rank, found " + std::to_string(tensors.size()));
  }
  for (const at::Tensor& one : tensors) check_fits(how, dense(how, one), like, 1);
  return {tensors, {}, std::vector<size_t>(tensors.size(), like.nbytes())};
}

Parts FlatBackend::parts_like(const How& how, const at::Tensor& whole,
                              const at::Tensor& like) const {
  check_fits(how, dense(how, whole), like, getSize());
  return {{}, whole, std::vector<size_t>(static_cast<size_t>(getSize()), like.nbytes())};
}

// `sizes` are rows of each rank; without any, all have as many.
Parts FlatBackend::parts_split(const How& how, const at::Tensor& whole, const Sizes& sizes) const {
  const int64_t rows = dense(how, whole).dim() == 0 ? 0 : whole.size(0);
  const auto ranks = static_cast<size_t>(getSize());
  Sizes split = sizes;
  if (sizes.empty() && rows % getSize() == 0) split.assign(ranks, rows / getSize());
  if (split.size() != ranks ||
      std::any_of(split.begin(), split.end(), [](int64_t size) { return size < 0; }) ||
      std::accumulate(split.begin(), split.end(), int64_t{0}) != rows) {
    refuse(std::string(how.name) + ": expected split sizes, one for each rank, that add up to " +
           std::to_string(rows) + " rows");
  }
  const size_t row_bytes = rows == 0 ? 0 : whole.nbytes() / static_cast<size_t>(rows);
  Parts parts{{}, whole, {}};
  for (const int64_t count : split) parts.bytes.push_back(static_cast<size_t>(count) * row_bytes);
  return parts;
}

// -- c10d's calls

WorkPtr FlatBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  How made = how(OpType::BROADCAST, "broadcast", opts, tensors);
  const at::Tensor& tensor = only(made, tensors);
  const int root = member(made, opts.rootRank);
  return start_broadcast(std::move(made), tensor, root);
}

WorkPtr FlatBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].layout() == at::kSparse) {
    return allreduce_sparse(tensors, opts);
  }
  How made = how(OpType::ALLREDUCE, "all_reduce", opts, tensors);
  only(made, tensors);
  return start_sum(std::move(made), tensors, opts.reduceOp);
}

WorkPtr FlatBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  How made = how(OpType::_ALLREDUCE_SPARSE, "all_reduce", opts, tensors);
  if (tensors.size() != 1 || tensors[0].layout() != at::kSparse) {
    refuse("all_reduce_sparse: expected one sparse tensor");
  }
  if (opts.reduceOp.op_ != c10d::ReduceOp::SUM) {
    refuse("all_reduce: expected SUM, which is all that sparse tensors have");
  }
  return start_sparse_sum(std::move(made), tensors[0]);
}

WorkPtr FlatBackend::allreduce_coalesced(Tensors& tensors,
                                         const c10d::AllreduceCoalescedOptions& opts) {
  How made = how(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", opts, tensors);
  for (const at::Tensor& tensor : tensors) dense(made, tensor);
  return start_sum(std::move(made), tensors, opts.reduceOp);
}

WorkPtr FlatBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  How made = how(OpType::REDUCE, "reduce", opts, tensors);
  const at::Tensor& tensor = only(made, tensors);
  const int root = member(made, opts.rootRank);
  return start_reduce(std::move(made), tensor, opts.reduceOp, root);
}

WorkPtr FlatBackend::allgather(TensorLists& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& opts) {
  How made = how(OpType::ALLGATHER, "all_gather", opts);
  made.result = only(made, outputs, "outputs");
  const at::Tensor& input = only(made, inputs);
  const std::vector<Gathered> calls{{parts_like(made, outputs[0], input), input}};
  return start_all_gather(std::move(made), calls);
}

WorkPtr FlatBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) {
  How made = how(OpType::ALLGATHER_COALESCED, "all_gather_coalesced", opts);
  for (const Tensors& of_rank : outputs) check_pairs(made, of_rank, inputs);
  std::vector<Gathered> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_ranks;
    for (const Tensors& of_rank : outputs) of_ranks.push_back(of_rank[i]);
    calls.push_back({parts_like(made, of_ranks, dense(made, inputs[i])), inputs[i]});
    made.result.insert(made.result.end(), of_ranks.begin(), of_ranks.end());
  }
  return start_all_gather(std::move(made), calls);
}

WorkPtr FlatBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& opts) {
  How made = how(OpType::_ALLGATHER_BASE, "all_gather_into_tensor", opts, {output});
  const std::vector<Gathered> calls{{parts_like(made, output, dense(made, input)), input}};
  return start_all_gather(std::move(made), calls);
}

WorkPtr FlatBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  How made = how(OpType::COALESCED, "all_gather_into_tensor", opts, outputs);
  check_pairs(made, outputs, inputs);
  std::vector<Gathered> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back({parts_like(made, outputs[i], dense(made, inputs[i])), inputs[i]});
  }
  return start_all_gather(std::move(made), calls);
}

WorkPtr FlatBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  How made = how(OpType::REDUCE_SCATTER, "reduce_scatter", opts, outputs);
  const at::Tensor& output = only(made, outputs);
  const std::vector<Scattered> calls{
      {output, parts_like(made, only(made, inputs, "inputs"), output)}};
  return start_reduce_scatter(std::move(made), calls, opts.reduceOp);
}

WorkPtr FlatBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& opts) {
  How made = how(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", opts, {output});
  const std::vector<Scattered> calls{{output, parts_like(made, input, dense(made, output))}};
  return start_reduce_scatter(std::move(made), calls, opts.reduceOp);
}

WorkPtr FlatBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  How made = how(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", opts, outputs);
  check_pairs(made, outputs, inputs);
  std::vector<Scattered> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back({outputs[i], parts_like(made, inputs[i], dense(made, outputs[i]))});
  }
  return start_reduce_scatter(std::move(made), calls, opts.reduceOp);
}

WorkPtr FlatBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_sizes,
                                   Sizes& input_sizes, const c10d::AllToAllOptions& opts) {
  How made = how(OpType::ALLTOALL_BASE, "all_to_all_single", opts, {output});
  if (output.scalar_type() != input.scalar_type()) {
    refuse("all_to_all_single: expected one dtype of input and output");
  }
  const Parts out = parts_split(made, output, output_sizes);
  const Parts in = parts_split(made, input, input_sizes);
  return start_all_to_all(std::move(made), out, in);
}

WorkPtr FlatBackend::alltoall(Tensors& outputs, Tensors& inputs,
                              const c10d::AllToAllOptions& opts) {
  How made = how(OpType::ALLTOALL, "all_to_all", opts, outputs);
  const auto parts_of = [&](const Tensors& tensors) {
    if (tensors.size() != static_cast<size_t>(getSize())) {
      refuse("all_to_all: expected lists of " + std::to_string(getSize()) + " tensors");
    }
    Parts parts{tensors, {}, {}};
    for (const at::Tensor& tensor : tensors) {
      parts.bytes.push_back(dense(made, tensor).nbytes());
      if (tensor.scalar_type() != outputs[0].scalar_type()) {
        refuse("all_to_all: expected one dtype of all tensors");
      }
    }
    return parts;
  };
  const Parts out = parts_of(outputs), in = parts_of(inputs);
  return start_all_to_all(std::move(made), out, in);
}

WorkPtr FlatBackend::gather(TensorLists& outputs, Tensors& inputs,
                            const c10d::GatherOptions& opts) {
  How made = how(OpType::GATHER, "gather", opts);
  const int root = member(made, opts.rootRank);
  const bool is_root = getRank() == root;
  if (outputs.size() != (is_root ? 1 : 0)) {
    refuse("gather: expected one list of outputs on the root, and none elsewhere");
  }
  Gathered call{{}, only(made, inputs)};
  if (is_root) {
    call.outputs = parts_like(made, outputs[0], call.input);
    made.result = outputs[0];
  }
  return start_gather(std::move(made), call, root);
}

WorkPtr FlatBackend::scatter(Tensors& outputs, TensorLists& inputs,
                             const c10d::ScatterOptions& opts) {
  How made = how(OpType::SCATTER, "scatter", opts, outputs);
  const int root = member(made, opts.rootRank);
  const bool is_root = getRank() == root;
  if (inputs.size() != (is_root ? 1 : 0)) {
    refuse("scatter: expected one list of inputs on the root, and none elsewhere");
  }
  Scattered call{only(made, outputs), {}};
  if (is_root) call.inputs = parts_like(made, inputs[0], call.output);
  return start_scatter(std::move(made), call, root);
}

WorkPtr FlatBackend::barrier(const c10d::BarrierOptions& opts) {
  return start_barrier(how(OpType::BARRIER, "barrier", opts));
}

WorkPtr FlatBackend::message(OpType type, const char* name, const Tensors& tensors, int peer,
                             int tag) {
  ++calls_;
  How made{type, name, timeout(), false, tensors};
  const at::Tensor& tensor = only(made, tensors);
  if (tag < 0) {
    refuse(std::string(name) + ": expected a tag of 0 or more, found " + std::to_string(tag));
  }
  if (type != OpType::RECVANYSOURCE) {
    member(made, peer);
  } else if (getSize() == 1) {
    refuse("a group of one rank has nobody to receive from");
  }
  return start_message(std::move(made), {type == OpType::SEND, tensor, peer, tag});
}

WorkPtr FlatBackend::send(Tensors& tensors, int peer, int tag) {
  return message(OpType::SEND, "send", tensors, peer, tag);
}

WorkPtr FlatBackend::recv(Tensors& tensors, int peer, int tag) {
  return message(OpType::RECV, "recv", tensors, peer, tag);
}

WorkPtr FlatBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(OpType::RECVANYSOURCE, "recv", tensors, kAnyRank, tag);
}

}  // namespace cpudist::backends
