// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The collectives of c10d, made of those of oneCCL. What only moves data moves bytes, of any dtype.
#include <numeric>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>

#include "backends/ccl/backend.h"

namespace cpudist::backends::ccl {

namespace {

using c10d::OpType;

// Work without a part where there is nothing to move, which all members know.
std::vector<Part> unless_empty(const at::Tensor& tensor, Part part) {
  std::vector<Part> parts;
  if (tensor.nbytes() > 0) parts.push_back(std::move(part));
  return parts;
}

void check_same(const at::Tensor& first, const at::Tensor& second, int64_t times,
                const char* name) {
  TORCH_CHECK_TYPE(first.scalar_type() == second.scalar_type(), "ccl: ", name, " from ",
                   second.scalar_type(), " to ", first.scalar_type(), ": expected one dtype");
  TORCH_CHECK_VALUE(first.numel() == second.numel() * times, "ccl: ", name, ": ", first.numel(),
                    " elements do not hold ", times, " x ", second.numel());
}

void check_list(const Tensors& tensors, const at::Tensor& like, int size, const char* name) {
  TORCH_CHECK_VALUE(static_cast<int>(tensors.size()) == size, "ccl: ", name, ": expected ", size,
                    " tensors, one of each rank, found ", tensors.size());
  for (const at::Tensor& tensor : tensors) check_same(checked(tensor, name), like, 1, name);
}

std::vector<size_t> bytes_of(const Tensors& tensors) {
  std::vector<size_t> bytes;
  for (const at::Tensor& tensor : tensors) bytes.push_back(tensor.nbytes());
  return bytes;
}

// All values one after the other, of one dtype.
at::Tensor joined(const Tensors& tensors) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  Tensors flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  return at::cat(flat);
}

at::Tensor room_for(const Tensors& tensors, const at::TensorOptions& options) {
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += tensor.numel();
  return at::empty({count}, options);
}

// Copies what `joined` would make of the tensors back to them.
void separate(const at::Tensor& values, const Tensors& tensors) {
  int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(values.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

std::vector<size_t> split_bytes(const at::Tensor& tensor, std::vector<int64_t>& splits, int size) {
  c10d::checkSplitSizes(splits, tensor, size);
  std::vector<size_t> lengths(static_cast<size_t>(size));
  std::vector<size_t> offsets(static_cast<size_t>(size));
  c10d::computeLengthsAndOffsets(splits, tensor, &lengths, &offsets);
  for (size_t& length : lengths) length *= tensor.element_size();
  return lengths;
}

int64_t bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

Signature reduces(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op,
                  int64_t root = -1) {
  const auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
  return Signature{name, kind, static_cast<int>(tensor.scalar_type()), root, bytes(tensor)};
}

Signature moves(const char* name, const at::Tensor& tensor, int64_t root = -1) {
  return Signature{name, -1, -1, root, bytes(tensor)};
}

}  // namespace

CclBackend::Work CclBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  Part part = sum(tensor, options.reduceOp);
  check(reduces("all_reduce", tensor, options.reduceOp));
  return launch(OpType::ALLREDUCE, "ccl:all_reduce", options.timeout,
                unless_empty(tensor, std::move(part)), tensors);
}

CclBackend::Work CclBackend::allreduce_coalesced(Tensors& tensors,
                                                 const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.nbytes() > 0) parts.push_back(sum(tensor, options.reduceOp));
    check(reduces("all_reduce", tensor, options.reduceOp));
  }
  return launch(OpType::ALLREDUCE_COALESCED, "ccl:all_reduce_coalesced", options.timeout,
                std::move(parts), tensors);
}

CclBackend::Work CclBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "reduce");
  check_root(options.rootRank);
  const auto& op = options.reduceOp;
  const int reduction = reduction_of(tensor, op, "reduce");
  const Wire wire = wire_of(tensor, op, "reduce");
  check(reduces("reduce", tensor, op, options.rootRank));
  const auto root = static_cast<int>(options.rootRank);
  const bool here = root == getRank();
  const at::Tensor out = here ? wire.buffer : at::empty_like(wire.buffer);
  Part part{[=](const cpudist_ccl_shim& calls, void* communicator) {
              return calls.reduce(communicator, wire.buffer.const_data_ptr(),
                                  out.mutable_data_ptr(), static_cast<size_t>(out.numel()),
                                  wire.dtype, reduction, root);
            },
            [=, size = getSize()] {
              if (!here) return;
              average(wire.buffer, op, size);
              write_back(wire, tensor);
            }};
  return launch(OpType::REDUCE, "ccl:reduce", options.timeout,
                unless_empty(tensor, std::move(part)), tensors);
}

CclBackend::Work CclBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  check_root(options.rootRank);
  check(moves("broadcast", tensor, options.rootRank));
  const at::Tensor buffer = contiguous(tensor);
  const auto root = static_cast<int>(options.rootRank);
  Part part{[=](const cpudist_ccl_shim& calls, void* communicator) {
              return calls.broadcast(communicator, buffer.mutable_data_ptr(), buffer.nbytes(),
                                     root);
            },
            [=] {
              if (!buffer.is_same(tensor)) tensor.copy_(buffer);
            }};
  return launch(OpType::BROADCAST, "ccl:broadcast", options.timeout,
                unless_empty(tensor, std::move(part)), tensors);
}

CclBackend::Work CclBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only(inputs, "all_gather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "ccl: all_gather takes one list of outputs");
  check_list(outputs[0], input, getSize(), "all_gather");
  check(moves("all_gather", input));
  const at::Tensor all = room_for(outputs[0], input.options());
  Part part = gather_equal(all, input);
  part.after = [all, in = part.after, list = outputs[0]] { separate(all, list); };
  return launch(OpType::ALLGATHER, "ccl:all_gather", options.timeout,
                unless_empty(input, std::move(part)), outputs[0]);
}

CclBackend::Work CclBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

CclBackend::Work CclBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(),
                    "ccl: all_gather_into_tensor: ", outputs.size(), " outputs, ", inputs.size(),
                    " inputs");
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_same(checked(outputs[i], "all_gather_into_tensor"),
               checked(inputs[i], "all_gather_into_tensor"), getSize(), "all_gather_into_tensor");
    check(moves("all_gather", inputs[i]));
    if (inputs[i].nbytes() > 0) parts.push_back(gather_equal(outputs[i], inputs[i]));
  }
  return launch(OpType::_ALLGATHER_BASE, "ccl:all_gather_into_tensor", options.timeout,
                std::move(parts), outputs);
}

CclBackend::Work CclBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "ccl: reduce_scatter takes one list of inputs");
  check_list(inputs[0], output, getSize(), "reduce_scatter");
  check(reduces("reduce_scatter", output, options.reduceOp));
  Part part = scatter_sum(output, joined(inputs[0]), options.reduceOp);
  return launch(OpType::REDUCE_SCATTER, "ccl:reduce_scatter", options.timeout,
                unless_empty(output, std::move(part)), outputs);
}

CclBackend::Work CclBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

CclBackend::Work CclBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "ccl: reduce_scatter_tensor: ", outputs.size(),
                    " outputs, ", inputs.size(), " inputs");
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_same(checked(inputs[i], "reduce_scatter_tensor"),
               checked(outputs[i], "reduce_scatter_tensor"), getSize(), "reduce_scatter_tensor");
    Part part = scatter_sum(outputs[i], inputs[i], options.reduceOp);
    check(reduces("reduce_scatter", outputs[i], options.reduceOp));
    if (outputs[i].nbytes() > 0) parts.push_back(std::move(part));
  }
  return launch(OpType::_REDUCE_SCATTER_BASE, "ccl:reduce_scatter_tensor", options.timeout,
                std::move(parts), outputs);
}

CclBackend::Work CclBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<int64_t>& output_splits,
                                           std::vector<int64_t>& input_splits,
                                           const c10d::AllToAllOptions& options) {
  checked(input, "all_to_all_single");
  checked(output, "all_to_all_single");
  TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(),
                   "ccl: all_to_all_single: expected one dtype of input and output");
  const std::vector<size_t> in_bytes = split_bytes(input, input_splits, getSize());
  const std::vector<size_t> out_bytes = split_bytes(output, output_splits, getSize());
  check(Signature{"all_to_all", -1, -1, -1, 0, in_bytes, out_bytes});
  const at::Tensor in = contiguous(input);
  const at::Tensor out =
      output.is_contiguous() ? output : at::empty(output.sizes(), output.options());
  std::vector<Part> parts;
  parts.push_back(exchange(out, out_bytes, in, in_bytes, [out, output] {
    if (!out.is_same(output)) output.copy_(out);
  }));
  return launch(OpType::ALLTOALL_BASE, "ccl:all_to_all_single", options.timeout, std::move(parts),
                {output});
}

CclBackend::Work CclBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllToAllOptions& options) {
  const auto size = static_cast<size_t>(getSize());
  TORCH_CHECK_VALUE(outputs.size() == size && inputs.size() == size, "ccl: all_to_all: expected ",
                    size, " inputs and outputs, found ", inputs.size(), " and ", outputs.size());
  for (const Tensors* list : {&outputs, &inputs}) {
    for (const at::Tensor& tensor : *list) {
      TORCH_CHECK_TYPE(checked(tensor, "all_to_all").scalar_type() == inputs[0].scalar_type(),
                       "ccl: all_to_all: expected one dtype of all tensors");
    }
  }
  check(Signature{"all_to_all", -1, -1, -1, 0, bytes_of(inputs), bytes_of(outputs)});
  const at::Tensor out = room_for(outputs, inputs[0].options());
  std::vector<Part> parts;
  parts.push_back(exchange(out, bytes_of(outputs), joined(inputs), bytes_of(inputs),
                           [out, list = outputs] { separate(out, list); }));
  return launch(OpType::ALLTOALL, "ccl:all_to_all", options.timeout, std::move(parts), outputs);
}

CclBackend::Work CclBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::GatherOptions& options) {
  const at::Tensor& input = only(inputs, "gather");
  check_root(options.rootRank);
  const auto root = static_cast<size_t>(options.rootRank);
  const bool here = options.rootRank == getRank();
  Tensors list = here && outputs.size() == 1 ? outputs[0] : Tensors{};
  if (here) check_list(list, input, getSize(), "gather");
  check(moves("gather", input, options.rootRank));
  std::vector<size_t> in_bytes(static_cast<size_t>(getSize()), 0);
  in_bytes[root] = input.nbytes();
  std::vector<size_t> out_bytes(in_bytes.size(), here ? input.nbytes() : 0);
  // A place for the address, where nothing comes.
  const at::Tensor out = here ? room_for(list, input.options()) : at::empty({1}, input.options());
  Part part = exchange(out, out_bytes, contiguous(input), in_bytes, [out, list, here] {
    if (here) separate(out, list);
  });
  return launch(OpType::GATHER, "ccl:gather", options.timeout, unless_empty(input, std::move(part)),
                list);
}

CclBackend::Work CclBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ScatterOptions& options) {
  const at::Tensor& output = only(outputs, "scatter");
  check_root(options.rootRank);
  const auto root = static_cast<size_t>(options.rootRank);
  const bool here = options.rootRank == getRank();
  const Tensors list = here && inputs.size() == 1 ? inputs[0] : Tensors{};
  if (here) check_list(list, output, getSize(), "scatter");
  check(moves("scatter", output, options.rootRank));
  std::vector<size_t> out_bytes(static_cast<size_t>(getSize()), 0);
  out_bytes[root] = output.nbytes();
  std::vector<size_t> in_bytes(out_bytes.size(), here ? output.nbytes() : 0);
  const at::Tensor in = here ? joined(list) : at::empty({1}, output.options());
  const at::Tensor out =
      output.is_contiguous() ? output : at::empty(output.sizes(), output.options());
  Part part = exchange(out, out_bytes, in, in_bytes, [out, output] {
    if (!out.is_same(output)) output.copy_(out);
  });
  return launch(OpType::SCATTER, "ccl:scatter", options.timeout,
                unless_empty(output, std::move(part)), outputs);
}

CclBackend::Work CclBackend::barrier(const c10d::BarrierOptions& options) {
  check(Signature{"barrier"});
  Part part{
      [](const cpudist_ccl_shim& calls, void* communicator) { return calls.barrier(communicator); },
      {}};
  std::vector<Part> parts;
  parts.push_back(std::move(part));
  return launch(OpType::BARRIER, "ccl:barrier", options.timeout, std::move(parts), {});
}

namespace {

void check_message(int tag, int peer, int rank, const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(tag == 0, "ccl: ", name, " with tag ", tag,
                              ": oneCCL has no tags; messages between two ranks arrive in the ",
                              "order in which they are sent. Use tag 0, or gloo or shm");
  TORCH_CHECK_VALUE(peer != rank, "ccl: ", name, " between rank ", rank, " and itself");
}

}  // namespace

CclBackend::Work CclBackend::send(Tensors& tensors, int peer, int tag) {
  const at::Tensor& tensor = only(tensors, "send");
  check_root(peer);
  check_message(tag, peer, getRank(), "send");
  return launch(OpType::SEND, "ccl:send", c10d::kUnsetTimeout,
                unless_empty(tensor, message(tensor, peer, true)), tensors, peer);
}

CclBackend::Work CclBackend::recv(Tensors& tensors, int peer, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  check_root(peer);
  check_message(tag, peer, getRank(), "recv");
  return launch(OpType::RECV, "ccl:recv", c10d::kUnsetTimeout,
                unless_empty(tensor, message(tensor, peer, false)), tensors, peer);
}

CclBackend::Work CclBackend::recvAnysource(Tensors& /*tensors*/, int /*tag*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "ccl: recv from any rank is not supported by oneCCL. Name the ",
                              "rank, or use gloo for this group");
}

}  // namespace cpudist::backends::ccl
