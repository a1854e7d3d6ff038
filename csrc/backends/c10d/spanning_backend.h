// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The c10d backend of ranks on several hosts: shared memory inside each, gloo between the first
// ranks of the hosts. What has nothing to gain from that goes over a gloo group of all ranks.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backends/c10d/serial.h"
#include "backends/c10d/shm_backend.h"
#include "backends/shm/rendezvous.h"

namespace cpudist::backends {

// What gloo, which has few dtypes, is given of tensors that are only moved.
inline at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.flatten().view(at::kByte); }

class SpanningBackend : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Milliseconds = std::chrono::milliseconds;

  // `between`: gloo of the first ranks of the hosts, on those; `everyone`: gloo of all.
  SpanningBackend(int rank, int size, Milliseconds timeout, c10::intrusive_ptr<c10d::Store> store,
                  const shm::Host& host, c10::intrusive_ptr<ShmBackend> local, BackendPtr between,
                  BackendPtr everyone);
  ~SpanningBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(Milliseconds timeout) override;
  void shutdown() override;
  void abort() override { shutdown(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_sizes,
                        Sizes& input_sizes, const c10d::AllToAllOptions& opts) override;

  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  std::vector<std::vector<int>> hosts() const;
  // In memory of the ranks of this host.
  at::Tensor empty(int64_t numel, at::ScalarType dtype) { return local_->empty(numel, dtype); }

 private:
  // A call that gloo has begun within this limit.
  using Begin = std::function<WorkPtr(Milliseconds)>;

  WorkPtr start(c10d::OpType type, Tensors result, Serial::Job job, bool wait);
  // The same of a collective over all ranks' gloo.
  WorkPtr start_everywhere(c10d::OpType type, Tensors result, Milliseconds timeout, Begin begin,
                           bool wait);
  WorkPtr message(c10d::OpType type, const Tensors& tensors, int peer,
                  const std::function<WorkPtr(Tensors&)>& begin);
  Milliseconds limit_of(Milliseconds timeout) const;
  void wait_between(const WorkPtr& work, Milliseconds limit);
  [[noreturn]] void fail(const Error& error);
  [[noreturn]] void leave();
  void tell(const Error& error);
  std::optional<Error> told_failure();

  // Blocking, in the serial order; `limit` for each step.
  void sum(const at::Tensor& tensor, const c10d::ReduceOp& op, Milliseconds limit);
  // Of the first ranks of the hosts.
  void sum_between(const at::Tensor& tensor, const c10d::ReduceOp& op, Milliseconds limit);
  void spread(at::Tensor tensor, int root, Milliseconds limit);
  void collect(const at::Tensor& output, const at::Tensor& input, Milliseconds limit);

  bool leads() const { return rank_ == host_of_[static_cast<size_t>(rank_)]; }
  // Of a rank on this host, its place among the host's.
  int local_rank(int rank) const;
  bool is_local(int rank) const;
  int leader_index(int rank) const;
  size_t most_members() const;
  std::vector<int> members_of(int leader) const;

  Milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<int> host_of_;  // by rank: the first rank of its host
  std::vector<int> leaders_;
  c10::intrusive_ptr<ShmBackend> local_;
  BackendPtr between_;
  BackendPtr everyone_;
  uint64_t calls_ = 0;
  std::atomic<bool> failed_{false};
  std::atomic<bool> closing_{false};
  Serial serial_;
};

}  // namespace cpudist::backends
