// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The collectives of c10d as calls of backend shm.
#include "backends/c10d/shm_backend.h"

#include <string>

#include "backends/c10d/shm_work.h"
#include "backends/c10d/tensors.h"

namespace cpudist::backends {

using shm::Kind;

namespace {

// Where each rank's part begins.
std::vector<const void*> inputs_of(const Parts& parts, Held& held) {
  std::vector<const void*> found;
  for (const at::Tensor& tensor : parts.tensors) found.push_back(held.in(tensor));
  if (!parts.whole.defined()) return found;
  const auto* at = static_cast<const std::byte*>(held.in(parts.whole));
  for (const size_t bytes : parts.bytes) {
    found.push_back(at);
    at += bytes;
  }
  return found;
}

std::vector<void*> outputs_of(const Parts& parts, Held& held) {
  std::vector<void*> found;
  for (const at::Tensor& tensor : parts.tensors) found.push_back(held.out(tensor));
  if (!parts.whole.defined()) return found;
  auto* at = static_cast<std::byte*>(held.out(parts.whole));
  for (const size_t bytes : parts.bytes) {
    found.push_back(at);
    at += bytes;
  }
  return found;
}

}  // namespace

WorkPtr ShmBackend::start(How how, std::vector<Prepared> calls) {
  auto completion = std::make_shared<Completion>(std::move(how.result), calls.size());
  auto work = c10::make_intrusive<ShmWork>(getRank(), how.type, group_, completion);
  for (Prepared& one : calls) {
    shm::Submission submission;
    submission.call = std::move(one.call);
    submission.timeout = how.limit;
    submission.wait = how.wait;
    submission.finish = [held = std::move(one.held)] { held.finish(); };
    submission.notify = [completion](std::exception_ptr error) { completion->ended(error); };
    work->add(group_->engine.submit(std::move(submission)));
  }
  return work;
}

WorkPtr ShmBackend::start(How how, Prepared call) {
  std::vector<Prepared> calls;
  calls.push_back(std::move(call));
  return start(std::move(how), std::move(calls));
}

WorkPtr ShmBackend::start_broadcast(How how, const at::Tensor& tensor, int root) {
  Prepared one;
  one.call.kind = Kind::kBroadcast;
  one.call.root = root;
  describe(one.call, tensor);
  one.call.in = one.call.out = one.held.out(tensor);
  return start(std::move(how), std::move(one));
}

WorkPtr ShmBackend::start_sum(How how, const Tensors& tensors, const c10d::ReduceOp& op) {
  std::vector<Prepared> calls;
  for (const at::Tensor& tensor : tensors) {
    Prepared& one = calls.emplace_back();
    one.call.kind = Kind::kAllReduce;
    describe(one.call, tensor, op);
    one.call.in = one.call.out = one.held.out(tensor);
  }
  return start(std::move(how), std::move(calls));
}

at::Tensor ShmBackend::gathered(const How& how, const at::Tensor& tensor) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), getSize());
  at::Tensor all = at::empty(shape, tensor.options());
  const std::vector<size_t> bytes(static_cast<size_t>(getSize()), tensor.nbytes());
  start(How{c10d::OpType::_ALLGATHER_BASE, how.name, how.limit, true, {}},
        gathering({{{}, all, bytes}, tensor}, Kind::kAllGather));
  return all;
}

// Rows of all ranks, summed; in the caller's thread, since each step needs the one before.
WorkPtr ShmBackend::start_sparse_sum(How how, const at::Tensor& tensor) {
  const at::Tensor own = tensor.coalesce();
  const at::Tensor counts = gathered(how, at::full({1}, own._nnz(), at::kLong));
  const int64_t most = counts.max().item<int64_t>();
  at::Tensor indices = at::zeros({own.sparse_dim(), most}, at::kLong);
  indices.narrow(1, 0, own._nnz()).copy_(own.indices());
  std::vector<int64_t> shape = own.values().sizes().vec();
  shape[0] = most;
  at::Tensor values = at::zeros(shape, own.values().options());
  values.narrow(0, 0, own._nnz()).copy_(own.values());
  const at::Tensor all_indices = gathered(how, indices);
  const at::Tensor all_values = gathered(how, values);
  std::vector<at::Tensor> index_parts, value_parts;
  for (int rank = 0; rank < getSize(); ++rank) {
    const int64_t count = counts[rank].item<int64_t>();
    index_parts.push_back(all_indices[rank].narrow(1, 0, count));
    value_parts.push_back(all_values[rank].narrow(0, 0, count));
  }
  const at::Tensor sum = at::sparse_coo_tensor(at::cat(index_parts, 1), at::cat(value_parts, 0),
                                               own.sizes(), own.options())
                             .coalesce();
  at::Tensor(tensor).copy_(sum);
  return start(std::move(how), std::vector<Prepared>{});
}

WorkPtr ShmBackend::start_reduce(How how, const at::Tensor& tensor, const c10d::ReduceOp& op,
                                 int root) {
  Prepared one;
  one.call.kind = Kind::kReduce;
  one.call.root = root;
  describe(one.call, tensor, op);
  if (getRank() == root) {
    one.call.in = one.call.out = one.held.out(tensor);
  } else {
    one.call.in = one.held.in(tensor);
  }
  return start(std::move(how), std::move(one));
}

ShmBackend::Prepared ShmBackend::gathering(const Gathered& call, Kind kind) {
  Prepared one;
  one.call.kind = kind;
  describe(one.call, call.input);
  one.call.in = one.held.in(call.input);
  one.call.outs = outputs_of(call.outputs, one.held);
  return one;
}

WorkPtr ShmBackend::start_all_gather(How how, const std::vector<Gathered>& calls) {
  std::vector<Prepared> prepared;
  for (const Gathered& call : calls) prepared.push_back(gathering(call, Kind::kAllGather));
  return start(std::move(how), std::move(prepared));
}

WorkPtr ShmBackend::start_gather(How how, const Gathered& call, int root) {
  Prepared one = gathering(call, Kind::kGather);
  one.call.root = root;
  return start(std::move(how), std::move(one));
}

WorkPtr ShmBackend::start_scatter(How how, const Scattered& call, int root) {
  Prepared one;
  one.call.kind = Kind::kScatter;
  one.call.root = root;
  describe(one.call, call.output);
  one.call.ins = inputs_of(call.inputs, one.held);
  one.call.out = one.held.out(call.output);
  return start(std::move(how), std::move(one));
}

WorkPtr ShmBackend::start_reduce_scatter(How how, const std::vector<Scattered>& calls,
                                         const c10d::ReduceOp& op) {
  std::vector<Prepared> prepared;
  for (const Scattered& call : calls) {
    Prepared& one = prepared.emplace_back();
    one.call.kind = Kind::kReduceScatter;
    describe(one.call, call.output, op);
    one.call.ins = inputs_of(call.inputs, one.held);
    one.call.out = one.held.out(call.output);
  }
  return start(std::move(how), std::move(prepared));
}

WorkPtr ShmBackend::start_all_to_all(How how, const Parts& outputs, const Parts& inputs) {
  Prepared one;
  one.call.kind = Kind::kAllToAll;
  one.call.ins = inputs_of(inputs, one.held);
  one.call.in_bytes = inputs.bytes;
  one.call.outs = outputs_of(outputs, one.held);
  one.call.out_bytes = outputs.bytes;
  return start(std::move(how), std::move(one));
}

WorkPtr ShmBackend::start_barrier(How how) { return start(std::move(how), Prepared{}); }

WorkPtr ShmBackend::start_message(How how, const Message& message) {
  static_assert(kAnyRank == shm::kAnySource);
  Held held;
  auto one = std::make_shared<shm::Message>();
  one->sends = message.sends;
  one->peer = message.peer;
  one->tag = message.tag;
  one->data = message.sends ? static_cast<std::byte*>(const_cast<void*>(held.in(message.tensor)))
                            : static_cast<std::byte*>(held.out(message.tensor));
  one->size_bytes = message.tensor.nbytes();
  one->dtype = dtype_of(message.tensor.scalar_type());
  one->timeout = how.limit;
  auto completion = std::make_shared<Completion>(std::move(how.result), 1);
  one->finish = [held = std::move(held)] { held.finish(); };
  one->notify = [completion](std::exception_ptr error) { completion->ended(error); };
  auto work = c10::make_intrusive<ShmWork>(getRank(), how.type, group_, completion);
  work->set(one);
  group_->messages.submit(one);
  return work;
}

at::Tensor ShmBackend::empty(int64_t numel, at::ScalarType dtype) {
  if (numel < 0) refuse("expected a number of elements, found " + std::to_string(numel));
  const auto options = at::TensorOptions().dtype(dtype);
  const size_t size_bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  auto buffer = group_->engine.allocate(size_bytes, timeout());
  void* data = buffer->own();
  return at::from_blob(data, {numel}, [buffer = std::move(buffer)](void*) {}, options);
}

}  // namespace cpudist::backends
