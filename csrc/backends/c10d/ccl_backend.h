// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The c10d backend over oneCCL: one communicator, whose operations the engine runs.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/c10d/flat_backend.h"
#include "backends/c10d/pairwise.h"
#include "backends/ccl/engine.h"

namespace cpudist::backends {

class CclBackend final : public FlatBackend, public PairwiseMessages {
 public:
  // Makes the communicator, see Engine::make. With `checks` every collective first compares what
  // the members call, at the price of an exchange.
  CclBackend(std::shared_ptr<ccl::Engine> engine, ccl::GroupOptions options, bool checks);
  ~CclBackend() override;

  // Fail what is in flight and give the communicator back.
  void shutdown() override { close(); }
  void abort() override { close(); }
  void fail_pairwise() override;
  void give_up(int peer) override;

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
  // One operation of oneCCL, and what is to be done with its result.
  struct Part {
    std::function<void*(const cpudist_ccl_shim& calls, void* communicator)> start;
    std::function<void()> after;
  };
  // What the members of a group must agree on in a collective.
  struct Signature {
    const char* name;
    int reduction = -1;
    int dtype = -1;
    int64_t root = -1;
    int64_t size_bytes = 0;
    // By rank; empty where all are equal.
    std::vector<size_t> in_bytes{};
    std::vector<size_t> out_bytes{};
  };

  WorkPtr launch(How how, std::vector<Part> parts, int peer = ccl::kNoPeer);
  // Null once it was closed.
  std::shared_ptr<ccl::Group> group() const;
  void close();
  // Throws what the members disagree about.
  void check(const Signature& own);
  static Signature reduces(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op,
                           int64_t root = -1);
  static Signature moves(const char* name, const at::Tensor& tensor, int64_t root = -1);
  // None where there is nothing to move, which all members know.
  static std::vector<Part> unless_empty(const at::Tensor& tensor, Part part);

  Part sum(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  static Part gather_equal(const at::Tensor& out, const at::Tensor& in,
                           std::function<void()> after);
  static Part exchange(const at::Tensor& out, std::vector<size_t> out_bytes, const at::Tensor& in,
                       std::vector<size_t> in_bytes, std::function<void()> after);

  std::shared_ptr<ccl::Engine> engine_;
  mutable std::mutex group_mutex_;
  std::shared_ptr<ccl::Group> group_;
  bool checks_;
};

}  // namespace cpudist::backends
