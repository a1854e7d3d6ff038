// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The c10d backend over oneCCL: one communicator, whose operations the engine runs.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backends/c10d/async_work.h"
#include "backends/c10d/pairwise.h"
#include "backends/ccl/engine.h"

namespace cpudist::backends::ccl {

using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

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

class CclBackend final : public c10d::Backend, public PairwiseMessages {
 public:
  // Makes the communicator, see Engine::make. With `checks` every collective first compares what
  // the members call, at the price of an exchange.
  CclBackend(std::shared_ptr<Engine> engine, GroupOptions options, bool checks);
  ~CclBackend() override;

  const std::string getBackendName() const override { return "ccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(Milliseconds timeout) override { timeout_ms_ = timeout.count(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override;
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs,
              const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs,
               const c10d::ScatterOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;
  Work send(Tensors& tensors, int peer, int tag) override;
  Work recv(Tensors& tensors, int peer, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;

  // Fail what is in flight and give the communicator back.
  void shutdown() override { close(); }
  void abort() override { close(); }
  void fail_pairwise() override;
  void give_up(int peer) override;

 private:
  Work launch(c10d::OpType type, const char* name, Milliseconds timeout, std::vector<Part> parts,
              Tensors outputs, int peer = kNoPeer);
  // Null once it was closed.
  std::shared_ptr<Group> group() const;
  void close();
  // Throws what the members disagree about.
  void check(const Signature& own);

  Part sum(const at::Tensor& tensor, const c10d::ReduceOp& op);
  Part gather_equal(const at::Tensor& output, const at::Tensor& input);
  Part scatter_sum(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  Part exchange(const at::Tensor& output, std::vector<size_t> out_bytes, const at::Tensor& input,
                std::vector<size_t> in_bytes, std::function<void()> after);
  Part message(const at::Tensor& tensor, int peer, bool sends);
  void check_root(int64_t root) const;

  std::shared_ptr<Engine> engine_;
  mutable std::mutex group_mutex_;
  std::shared_ptr<Group> group_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};
  bool checks_;
};

// What oneCCL gets of a tensor: contiguous, of a dtype that it has.
struct Wire {
  at::Tensor buffer;
  int dtype = 0;
  // Whether the buffer is not the tensor's own memory.
  bool copied = false;
};

// Throws if the tensor is not a dense one on the CPU.
const at::Tensor& checked(const at::Tensor& tensor, const char* name);
// A contiguous tensor with the same values: itself, or a copy.
at::Tensor contiguous(const at::Tensor& tensor);
// Throws for dtypes and reductions that oneCCL does not have.
Wire wire_of(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* name);
// Copies a buffer that is not the tensor's own to the tensor.
void write_back(const Wire& wire, const at::Tensor& tensor);
int reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* name);
const char* name_of(c10d::ReduceOp::RedOpType op);
// Divides sums, if an average is asked for.
void average(const at::Tensor& sums, const c10d::ReduceOp& op, int size);
// The one tensor of a list.
const at::Tensor& only(const Tensors& tensors, const char* name);

}  // namespace cpudist::backends::ccl
