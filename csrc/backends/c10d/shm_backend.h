// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The c10d backend of ranks that share a host.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "backends/c10d/flat_backend.h"
#include "backends/c10d/pairwise.h"
#include "backends/shm/group.h"

namespace cpudist::backends {

class ShmBackend final : public FlatBackend, public PairwiseMessages {
 public:
  ShmBackend(std::shared_ptr<shm::Group> group, int rank, int size, Milliseconds timeout)
      : FlatBackend("shm", "backend shm", rank, size, timeout), group_(std::move(group)) {}
  ~ShmBackend() override { group_->close(); }

  void shutdown() override { group_->close(); }
  void abort() override { group_->close(); }
  void fail_pairwise() override { group_->messages.fail_pairwise(); }
  void give_up(int peer) override { group_->messages.give_up(peer); }

  // A tensor in memory that all ranks map; all of them call it.
  at::Tensor empty(int64_t numel, at::ScalarType dtype);
  shm::Group& group() { return *group_; }

 protected:
  WorkPtr start_sum(How how, const Tensors& tensors, const c10d::ReduceOp& op) override;
  WorkPtr start_sparse_sum(How how, const at::Tensor& tensor) override;
  WorkPtr start_reduce(How how, const at::Tensor& tensor, const c10d::ReduceOp& op,
                       int root) override;
  WorkPtr start_broadcast(How how, const at::Tensor& tensor, int root) override;
  WorkPtr start_all_gather(How how, const std::vector<Gathered>& calls) override;
  WorkPtr start_reduce_scatter(How how, const std::vector<Scattered>& calls,
                               const c10d::ReduceOp& op) override;
  WorkPtr start_all_to_all(How how, const Parts& outputs, const Parts& inputs) override;
  WorkPtr start_gather(How how, const Gathered& call, int root) override;
  WorkPtr start_scatter(How how, const Scattered& call, int root) override;
  WorkPtr start_barrier(How how) override;
  WorkPtr start_message(How how, const Message& message) override;

 private:
  // One call with what it holds.
  struct Prepared {
    shm::Call call;
    Held held;
  };

  WorkPtr start(How how, std::vector<Prepared> calls);
  WorkPtr start(How how, Prepared call);
  static Prepared gathering(const Gathered& call, shm::Kind kind);
  at::Tensor gathered(const How& how, const at::Tensor& tensor);

  std::shared_ptr<shm::Group> group_;
};

}  // namespace cpudist::backends
