// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The c10d backend of ranks that share a host.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/c10d/pairwise.h"
#include "backends/c10d/shm_work.h"
#include "backends/c10d/tensors.h"
#include "backends/shm/group.h"

namespace cpudist::backends {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using Sizes = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class ShmBackend : public c10d::Backend, public PairwiseMessages {
 public:
  ShmBackend(std::shared_ptr<shm::Group> group, int rank, int size,
             std::chrono::milliseconds timeout)
      : Backend(rank, size), group_(std::move(group)), timeout_(timeout) {}
  ~ShmBackend() override { group_->close(); }

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void shutdown() override { group_->close(); }
  void abort() override { group_->close(); }
  void fail_pairwise() override { group_->messages.fail_pairwise(); }
  void give_up(int peer) override { group_->messages.give_up(peer); }
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
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_sizes,
                        Sizes& input_sizes, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  // A tensor in memory that all ranks map; all of them call it.
  at::Tensor empty(int64_t numel, at::ScalarType dtype);
  shm::Group& group() { return *group_; }

 private:
  // One call with what it holds.
  struct Prepared {
    shm::Call call;
    Held held;
  };

  WorkPtr start(c10d::OpType type, std::vector<Prepared> calls, Tensors result,
                std::chrono::milliseconds timeout, bool wait);
  WorkPtr start(c10d::OpType type, Prepared call, Tensors result, std::chrono::milliseconds timeout,
                bool wait);
  WorkPtr message(c10d::OpType type, bool sends, const at::Tensor& tensor, int peer, int tag);
  Prepared gather_call(const Tensors& outputs, const at::Tensor& input, shm::Kind kind);
  Prepared gather_base(const at::Tensor& output, const at::Tensor& input);
  Prepared scatter_base(const at::Tensor& output, const at::Tensor& input,
                        const c10d::ReduceOp& op);
  at::Tensor gathered(const at::Tensor& tensor, std::chrono::milliseconds timeout);

  std::shared_ptr<shm::Group> group_;
  std::chrono::milliseconds timeout_;
  uint64_t calls_ = 0;
};

}  // namespace cpudist::backends
