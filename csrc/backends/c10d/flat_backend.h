// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What our c10d backends share: the calls of c10d, which come as one tensor, lists and lists of
// lists, are checked and become few, of tensors that fit together.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"

namespace cpudist::backends {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using Sizes = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

constexpr int kAnyRank = -1;

// Whether its values are in one piece of memory, as they read.
bool is_plain(const at::Tensor& tensor);
// The same values in one piece of memory: itself, or a copy.
at::Tensor plain(const at::Tensor& tensor);

// Tensors that a call reads or writes: the user's where they are contiguous, else copies, which
// finish() copies back to those that are written. Keeps all alive. A view that conjugates or
// negates when it is read is copied, too.
class Held {
 public:
  const at::Tensor& in_tensor(const at::Tensor& tensor) {
    return kept_.emplace_back(plain(tensor));
  }
  const at::Tensor& out_tensor(const at::Tensor& tensor) {
    const at::Tensor& flat = in_tensor(tensor);
    if (!flat.is_same(tensor)) back_.emplace_back(tensor, flat);
    return flat;
  }
  const void* in(const at::Tensor& tensor) { return in_tensor(tensor).const_data_ptr(); }
  void* out(const at::Tensor& tensor) { return out_tensor(tensor).mutable_data_ptr(); }
  void finish() const;

 private:
  Tensors kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;
};

// What is of each rank: tensors of their own, or `whole`, where they are one after the other.
struct Parts {
  Tensors tensors;
  at::Tensor whole;
  std::vector<size_t> bytes;  // by rank
};

// All parts one after the other, in one piece of memory.
at::Tensor joined(const Parts& parts);

// One piece of memory for parts that are written.
class Room {
 public:
  explicit Room(Parts parts);
  const at::Tensor& memory() const { return memory_; }
  // Copies what was written to where it belongs.
  void settle() const;

 private:
  Parts parts_;
  at::Tensor memory_;
};

class FlatBackend : public c10d::Backend {
 public:
  // `title` begins messages.
  FlatBackend(const char* name, const char* title, int rank, int size, Milliseconds timeout)
      : Backend(rank, size), name_(name), title_(title), timeout_ms_(timeout.count()) {}

  const std::string getBackendName() const final { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() final;
  void setTimeout(Milliseconds timeout) override { timeout_ms_ = timeout.count(); }
  void setSequenceNumberForGroup() final {}
  uint64_t getSequenceNumberForGroup() final { return calls_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) final;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) final;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) final;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) final;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) final;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) final;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) final;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) final;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) final;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) final;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) final;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) final;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) final;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_sizes,
                        Sizes& input_sizes, const c10d::AllToAllOptions& opts) final;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) final;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) final;
  WorkPtr barrier(const c10d::BarrierOptions& opts) final;
  WorkPtr send(Tensors& tensors, int peer, int tag) final;
  WorkPtr recv(Tensors& tensors, int peer, int tag) final;
  WorkPtr recvAnysource(Tensors& tensors, int tag) final;

 protected:
  // How a call is made.
  struct How {
    c10d::OpType type;
    const char* name;  // for messages
    Milliseconds limit;
    bool wait;       // it may have ended when the call returns
    Tensors result;  // of the work
  };
  struct Gathered {
    Parts outputs;
    at::Tensor input;
  };
  struct Scattered {
    at::Tensor output;
    Parts inputs;
  };
  struct Message {
    bool sends;
    at::Tensor tensor;
    int peer;  // kAnyRank: from whom one comes first
    int tag;
  };

  // Dense tensors of the CPU, which fit together on this rank. What a collective does to them is
  // what torch.distributed says; parts of gather and scatter are there on the root only.
  virtual WorkPtr start_sum(How how, const Tensors& tensors, const c10d::ReduceOp& op) = 0;
  virtual WorkPtr start_sparse_sum(How how, const at::Tensor& tensor) = 0;
  virtual WorkPtr start_reduce(How how, const at::Tensor& tensor, const c10d::ReduceOp& op,
                               int root) = 0;
  virtual WorkPtr start_broadcast(How how, const at::Tensor& tensor, int root) = 0;
  virtual WorkPtr start_all_gather(How how, const std::vector<Gathered>& calls) = 0;
  virtual WorkPtr start_reduce_scatter(How how, const std::vector<Scattered>& calls,
                                       const c10d::ReduceOp& op) = 0;
  virtual WorkPtr start_all_to_all(How how, const Parts& outputs, const Parts& inputs) = 0;
  virtual WorkPtr start_gather(How how, const Gathered& call, int root) = 0;
  virtual WorkPtr start_scatter(How how, const Scattered& call, int root) = 0;
  virtual WorkPtr start_barrier(How how) = 0;
  virtual WorkPtr start_message(How how, const Message& message) = 0;

  [[noreturn]] void refuse(const std::string& what) const;
  Milliseconds timeout() const { return Milliseconds(timeout_ms_); }

 private:
  template <typename CallOptions>
  How how(c10d::OpType type, const char* name, const CallOptions& opts, Tensors result = {});
  WorkPtr message(c10d::OpType type, const char* name, const Tensors& tensors, int peer, int tag);
  const at::Tensor& dense(const How& how, const at::Tensor& tensor) const;
  const at::Tensor& only(const How& how, const Tensors& tensors) const;
  const Tensors& only(const How& how, const TensorLists& lists, const char* what) const;
  int member(const How& how, int64_t rank) const;
  void check_fits(const How& how, const at::Tensor& large, const at::Tensor& small,
                  int64_t times) const;
  void check_pairs(const How& how, const Tensors& outputs, const Tensors& inputs) const;
  Parts parts_like(const How& how, const Tensors& tensors, const at::Tensor& like) const;
  Parts parts_like(const How& how, const at::Tensor& whole, const at::Tensor& like) const;
  Parts parts_split(const How& how, const at::Tensor& whole, const Sizes& sizes) const;

  const char* const name_;
  const char* const title_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> calls_{0};
};

}  // namespace cpudist::backends
