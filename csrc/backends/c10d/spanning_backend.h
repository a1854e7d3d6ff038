// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The c10d backend of ranks on several hosts: shared memory inside each, gloo between the first
// ranks of the hosts. What has nothing to gain from that goes over a gloo group of all ranks; since
// gloo pairs collectives by the order in which they begin, all of them begin in the serial order.
// Messages are gloo's and not in that order: it pairs them by tags, which its collectives do not
// use. One that fails leaves the group as it is: links to other ranks may be whole.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "backends/c10d/serial.h"
#include "backends/c10d/shm_backend.h"
#include "backends/shm/rendezvous.h"

namespace cpudist::backends {

class SpanningBackend final : public FlatBackend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // `between`: gloo of the first ranks of the hosts, on those; `everyone`: gloo of all.
  SpanningBackend(int rank, int size, Milliseconds timeout, c10::intrusive_ptr<c10d::Store> store,
                  const shm::Host& host, c10::intrusive_ptr<ShmBackend> local, BackendPtr between,
                  BackendPtr everyone);
  ~SpanningBackend() override;

  void setTimeout(Milliseconds timeout) override;
  void shutdown() override;
  void abort() override { shutdown(); }

  std::vector<std::vector<int>> hosts() const;
  // In memory of the ranks of this host.
  at::Tensor empty(int64_t numel, at::ScalarType dtype) { return local_->empty(numel, dtype); }

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
  WorkPtr start(How how, Serial::Job job);
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

  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<int> host_of_;  // by rank: the first rank of its host
  std::vector<int> leaders_;
  c10::intrusive_ptr<ShmBackend> local_;
  BackendPtr between_;
  BackendPtr everyone_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> closing_{false};
  Serial serial_;
};

}  // namespace cpudist::backends
