// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Collectives over several hosts: inside each host first, then between, then inside again.
#include "backends/c10d/spanning_backend.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "backends/foreign_errors.h"
#include "base/wait.h"

namespace cpudist::backends {

using c10d::OpType;
using c10d::ReduceOp;

namespace {

// A wait for other hosts looks up after so long, for failures they tell of.
constexpr std::chrono::milliseconds kSlice{500};
// So long after a broken connection somebody may still say which rank was lost.
constexpr std::chrono::milliseconds kReason{1500};
constexpr const char* kFailed = "cpudist/shm/failed";
constexpr const char* kLeft = "backend shm: its group was destroyed before this call had ended";

}  // namespace

SpanningBackend::SpanningBackend(int rank, int size, Milliseconds timeout,
                                 c10::intrusive_ptr<c10d::Store> store, const shm::Host& host,
                                 c10::intrusive_ptr<ShmBackend> local, BackendPtr between,
                                 BackendPtr everyone)
    : Backend(rank, size),
      timeout_(timeout),
      store_(std::move(store)),
      host_of_(host.leader_of),
      leaders_(host.leaders),
      local_(std::move(local)),
      between_(std::move(between)),
      everyone_(std::move(everyone)) {}

SpanningBackend::~SpanningBackend() {
  closing_ = true;
  serial_.close();
  if (!failed_) return;
  // gloo's destructor would wait, until its timeout, for calls that have no end.
  static_cast<void>(between_.release());
  static_cast<void>(everyone_.release());
}

c10::intrusive_ptr<c10d::Backend::Options> SpanningBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void SpanningBackend::setTimeout(Milliseconds timeout) {
  timeout_ = timeout;
  local_->setTimeout(timeout);
}

void SpanningBackend::shutdown() {
  closing_ = true;  // which a job that waits for other hosts sees at its next look
  local_->shutdown();
  serial_.close();
}

SpanningBackend::Milliseconds SpanningBackend::limit_of(Milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
}

bool SpanningBackend::is_local(int rank) const {
  return host_of_.at(static_cast<size_t>(rank)) == host_of_[static_cast<size_t>(rank_)];
}

std::vector<int> SpanningBackend::members_of(int leader) const {
  std::vector<int> members;
  for (int rank = 0; rank < size_; ++rank) {
    if (host_of_[static_cast<size_t>(rank)] == leader) members.push_back(rank);
  }
  return members;
}

std::vector<std::vector<int>> SpanningBackend::hosts() const {
  std::vector<std::vector<int>> found;
  for (const int leader : leaders_) found.push_back(members_of(leader));
  return found;
}

int SpanningBackend::local_rank(int rank) const {
  const std::vector<int> members = members_of(host_of_.at(static_cast<size_t>(rank)));
  return static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
}

int SpanningBackend::leader_index(int rank) const {
  const int leader = host_of_.at(static_cast<size_t>(rank));
  return static_cast<int>(std::find(leaders_.begin(), leaders_.end(), leader) - leaders_.begin());
}

size_t SpanningBackend::most_members() const {
  size_t most = 0;
  for (const int leader : leaders_) most = std::max(most, members_of(leader).size());
  return most;
}

// The number of the code, a space, and the text.
std::optional<Error> SpanningBackend::told_failure() {
  try {
    if (!store_->check({kFailed})) return std::nullopt;
    const std::string told = store_->get_to_str(kFailed);
    const auto code = static_cast<ErrorCode>(std::stoul(told));
    return Error(code, told.substr(told.find(' ') + 1));
  } catch (const std::exception&) {
    return Error(ErrorCode::kPeerLost,
                 "the store of the group is gone, and with it the rank that holds it");
  }
}

// To the ranks of other hosts. gloo may have calls from here on that have no end.
void SpanningBackend::tell(const Error& error) {
  failed_ = true;
  try {
    const std::string code = std::to_string(static_cast<uint32_t>(error.code()));
    if (!store_->check({kFailed})) store_->set(kFailed, code + " " + error.what());
  } catch (const std::exception&) {
    // It went with the rank that is lost; others find that out as this one did.
  }
}

// Tells the ranks of this host, through its memory, and those of others, through the store.
void SpanningBackend::fail(const Error& error) {
  local_->group().engine.channel().break_group(std::make_exception_ptr(error));
  tell(error);
  throw error;
}

// The ranks of this host see that this one has left.
void SpanningBackend::leave() {
  const std::string name = local_->group().engine.channel().name(local_->getRank());
  tell(Error(ErrorCode::kPeerLost,
             "backend shm: " + name + " destroyed its group before a call had ended"));
  throw Error(ErrorCode::kClosed, kLeft);
}

void SpanningBackend::wait_between(const WorkPtr& work, Milliseconds limit) {
  const Clock::time_point end = Clock::now() + limit;
  while (true) {
    std::string found;
    try {
      work->wait(kSlice);
      return;
    } catch (const std::exception& error) {
      found = foreign_error(error).what();
    }
    if (closing_) throw Error(ErrorCode::kClosed, kLeft);
    const bool broken = work->isCompleted();
    std::optional<Error> told = told_failure();
    const Clock::time_point patience = Clock::now() + kReason;
    while (broken && !told && !closing_ && Clock::now() < patience) {
      let_pass(std::chrono::milliseconds(50));
      told = told_failure();
    }
    if (told) fail(*told);
    if (broken) {
      fail(Error(ErrorCode::kPeerLost, "backend shm: lost a rank on another host: " + found));
    }
    if (Clock::now() < end) continue;
    fail(Error(ErrorCode::kPeerLost, "backend shm: a rank on another host did not come within " +
                                         std::to_string(limit.count()) + " ms"));
  }
}

WorkPtr SpanningBackend::start(OpType type, Tensors result, Serial::Job job, bool wait) {
  ++calls_;
  auto work = c10::make_intrusive<SerialWork>(rank_, type, std::move(result));
  serial_.run(
      work,
      [this, job = std::move(job)] {
        // Results are written into tensors of the user, which may require gradients.
        const at::AutoDispatchBelowADInplaceOrView untracked;
        try {
          job();
        } catch (const Error& error) {
          if (error.code() == ErrorCode::kInvalidArgument) throw;
          if (closing_) leave();
          fail(error);
        }
      },
      wait);
  return work;
}

void SpanningBackend::spread(at::Tensor tensor, int root, Milliseconds limit) {
  Tensors one{tensor};
  c10d::BroadcastOptions inside;
  inside.timeout = limit;
  inside.asyncOp = false;
  if (is_local(root)) {
    inside.rootRank = local_rank(root);
    local_->broadcast(one, inside);
  }
  if (leads()) {
    c10d::BroadcastOptions outside;
    outside.rootRank = leader_index(root);
    outside.timeout = limit;
    Tensors bytes{bytes_of(tensor)};
    wait_between(between_->broadcast(bytes, outside), limit);
  }
  if (!is_local(root)) local_->broadcast(one, inside);
}

void SpanningBackend::collect(const at::Tensor& output, const at::Tensor& input,
                              Milliseconds limit) {
  const at::Tensor out = bytes_of(output).view({size_, -1});
  const int64_t width = out.size(1);
  const auto most = static_cast<int64_t>(most_members());
  TensorLists parts;
  at::Tensor mine;
  if (leads()) {
    mine = at::zeros({most, width}, at::kByte);
    Tensors& rows = parts.emplace_back();
    for (int row = 0; row < local_->getSize(); ++row) rows.push_back(mine[row]);
  }
  Tensors own{bytes_of(input)};
  c10d::GatherOptions inside;
  inside.timeout = limit;
  inside.asyncOp = false;
  local_->gather(parts, own, inside);
  if (leads()) {
    const auto hosts = static_cast<int64_t>(leaders_.size());
    at::Tensor all = at::empty({hosts * most, width}, at::kByte);
    c10d::AllgatherOptions outside;
    outside.timeout = limit;
    wait_between(between_->_allgather_base(all, mine, outside), limit);
    for (int64_t host = 0; host < hosts; ++host) {
      int64_t row = host * most;
      for (const int rank : members_of(leaders_[static_cast<size_t>(host)])) {
        out[rank].copy_(all[row++]);
      }
    }
  }
  Tensors whole{out};
  c10d::BroadcastOptions back;
  back.timeout = limit;
  back.asyncOp = false;
  local_->broadcast(whole, back);
}

// -- c10d's calls

WorkPtr SpanningBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  check_tensor(only(tensors));
  const auto job = [this, tensor = tensors[0], root = static_cast<int>(opts.rootRank),
                    limit = limit_of(opts.timeout)] {
    const at::Tensor flat = tensor.contiguous();
    spread(flat, root, limit);
    if (!flat.is_same(tensor)) at::Tensor(tensor).copy_(flat);
  };
  return start(OpType::BROADCAST, tensors, job, !opts.asyncOp);
}

WorkPtr SpanningBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (only(tensors).layout() == at::kSparse) return allreduce_sparse(tensors, opts);
  c10d::AllreduceCoalescedOptions list;
  list.reduceOp = opts.reduceOp;
  list.timeout = opts.timeout;
  list.asyncOp = opts.asyncOp;
  return allreduce_coalesced(tensors, list);
}

WorkPtr SpanningBackend::allreduce_coalesced(Tensors& tensors,
                                             const c10d::AllreduceCoalescedOptions& opts) {
  for (const at::Tensor& tensor : tensors) check_reduction(tensor, opts.reduceOp);
  const auto job = [this, tensors, op = opts.reduceOp, limit = limit_of(opts.timeout)] {
    for (const at::Tensor& tensor : tensors) {
      const at::Tensor flat = tensor.contiguous();
      sum(flat, op, limit);
      if (!flat.is_same(tensor)) at::Tensor(tensor).copy_(flat);
    }
  };
  return start(OpType::ALLREDUCE_COALESCED, tensors, job, !opts.asyncOp);
}

WorkPtr SpanningBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  check_reduction(only(tensors), opts.reduceOp);
  const auto job = [this, tensor = tensors[0], op = opts.reduceOp, root = opts.rootRank,
                    limit = limit_of(opts.timeout)] {
    const at::Tensor flat = tensor.clone(at::MemoryFormat::Contiguous);
    sum(flat, op, limit);
    if (rank_ == root) at::Tensor(tensor).copy_(flat);
  };
  return start(OpType::REDUCE, tensors, job, !opts.asyncOp);
}

WorkPtr SpanningBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& opts) {
  if (outputs.size() != 1) refuse("expected one list of outputs");
  check_tensor(only(inputs));
  check_list(outputs[0], inputs[0], size_);
  const auto job = [this, outputs = outputs[0], input = inputs[0], limit = limit_of(opts.timeout)] {
    const at::Tensor all = at::empty({size_, input.numel()}, input.options());
    collect(all, input.contiguous(), limit);
    for (int rank = 0; rank < size_; ++rank) {
      at::Tensor(outputs[static_cast<size_t>(rank)]).copy_(all[rank].view(input.sizes()));
    }
  };
  return start(OpType::ALLGATHER, outputs[0], job, !opts.asyncOp);
}

WorkPtr SpanningBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr SpanningBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  if (outputs.size() != inputs.size()) refuse("expected as many outputs as inputs");
  for (size_t i = 0; i < inputs.size(); ++i) check_flat(outputs[i], inputs[i], size_);
  const auto job = [this, outputs, inputs, limit = limit_of(opts.timeout)] {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor flat = outputs[i].contiguous();
      collect(flat, inputs[i].contiguous(), limit);
      if (!flat.is_same(outputs[i])) at::Tensor(outputs[i]).copy_(flat);
    }
  };
  return start(OpType::_ALLGATHER_BASE, outputs, job, !opts.asyncOp);
}

WorkPtr SpanningBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ReduceScatterOptions& opts) {
  if (inputs.size() != 1) refuse("expected one list of inputs");
  check_list(inputs[0], only(outputs), size_);
  Tensors flat{at::stack(inputs[0])};
  return reduce_scatter_tensor_coalesced(outputs, flat, opts);
}

WorkPtr SpanningBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr SpanningBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != inputs.size()) refuse("expected as many outputs as inputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_flat(inputs[i], outputs[i], size_);
    check_reduction(inputs[i], opts.reduceOp);
  }
  const auto job = [this, outputs, inputs, op = opts.reduceOp, limit = limit_of(opts.timeout)] {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor whole = inputs[i].clone(at::MemoryFormat::Contiguous);
      sum(whole, op, limit);
      const at::Tensor own = whole.view({size_, -1})[rank_];
      at::Tensor(outputs[i]).copy_(own.view(outputs[i].sizes()));
    }
  };
  return start(OpType::_REDUCE_SCATTER_BASE, outputs, job, !opts.asyncOp);
}

WorkPtr SpanningBackend::barrier(const c10d::BarrierOptions& opts) {
  const auto job = [this, limit = limit_of(opts.timeout)] {
    sum(at::zeros({1}, at::kInt), ReduceOp(ReduceOp::SUM), limit);
  };
  return start(OpType::BARRIER, {}, job, !opts.asyncOp);
}

}  // namespace cpudist::backends
