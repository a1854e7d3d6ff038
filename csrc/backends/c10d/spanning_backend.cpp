// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// long: one class
// Collectives over several hosts: inside each host first, then between, then inside again.
#include "backends/c10d/spanning_backend.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "backends/c10d/tensors.h"
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

// What gloo, which has few dtypes, is given of tensors that are only moved.
at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.flatten().view(at::kByte); }

// Booleans are or-ed and and-ed as bytes, as inside a host.
ReduceOp op_between(const ReduceOp& op, bool truth) {
  if (!truth) return op;
  if (op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::MAX) return ReduceOp::BOR;
  if (op.op_ == ReduceOp::PRODUCT || op.op_ == ReduceOp::MIN) return ReduceOp::BAND;
  return op;
}

// What a rank adds for an average of integers of `n` ranks. There is nothing wider than int64:
// those are quotients and rests of a division by n, whose sums both fit.
at::Tensor terms_of(const at::Tensor& tensor, int64_t n) {
  if (tensor.element_size() <= 2) return tensor.to(at::kInt);
  if (tensor.element_size() == 4) return tensor.to(at::kLong);
  const at::Tensor quotients = tensor.div(n, "trunc");
  return at::stack({quotients, tensor - quotients * n});
}

// The average, towards zero, of tensors of `type` whose terms sum up to `sums`.
at::Tensor average_of(const at::Tensor& sums, at::ScalarType type, int64_t n) {
  if (type != at::kLong) return sums.div(n, "trunc");
  const at::Tensor carried = sums[1].div(n, "trunc");
  const at::Tensor rest = sums[1] - carried * n;
  const at::Tensor average = sums[0] + carried;
  // A rest of the other sign has taken the quotient one too far from zero.
  const at::Tensor beyond = average.sign() * rest.sign() < 0;
  return average - average.sign() * beyond;
}

// `error` is gloo's.
[[noreturn]] void rethrow(const std::exception& error, const std::string& what) {
  const Error cause = foreign_error(error);
  const std::string found = cause.what();
  if (cause.code() == ErrorCode::kTimeout) {
    throw Error(ErrorCode::kTimeout,
                "backend shm: " + what + " had no end in time: " + found +
                    ". Let the other rank come to it; a longer pause needs a larger timeout "
                    "of the group.");
  }
  throw Error(ErrorCode::kPeerLost,
              "backend shm: " + what + ": lost a rank: " + found + ". Restart the run.");
}

class SpanningMessage : public c10d::Work {
 public:
  // `held`: what is to be done when it has been received.
  SpanningMessage(int rank, OpType type, WorkPtr work, std::string what, Held held)
      : Work(rank, type), work_(std::move(work)), what_(std::move(what)), held_(std::move(held)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  bool wait(std::chrono::milliseconds limit) override {
    try {
      if (!work_->wait(limit)) return false;  // aborted
    } catch (const std::exception& error) {
      rethrow(error, what_);
    }
    std::call_once(finished_, [this] { held_.finish(); });
    return true;
  }

 private:
  WorkPtr work_;
  std::string what_;
  Held held_;
  std::once_flag finished_;  // any thread may wait, and sees all of what was received
};

}  // namespace

SpanningBackend::SpanningBackend(int rank, int size, Milliseconds timeout,
                                 c10::intrusive_ptr<c10d::Store> store, const shm::Host& host,
                                 c10::intrusive_ptr<ShmBackend> local, BackendPtr between,
                                 BackendPtr everyone)
    : FlatBackend("shm", "backend shm", rank, size, timeout),
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

void SpanningBackend::setTimeout(Milliseconds timeout) {
  FlatBackend::setTimeout(timeout);
  local_->setTimeout(timeout);
}

void SpanningBackend::shutdown() {
  closing_ = true;  // which a job that waits for other hosts sees at its next look
  local_->shutdown();
  serial_.close();
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

WorkPtr SpanningBackend::start(How how, Serial::Job job) {
  auto work = c10::make_intrusive<SerialWork>(rank_, how.type, std::move(how.result));
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
      how.wait);
  return work;
}

// Of a tensor without elements there is nothing to move, on any rank.
void SpanningBackend::spread(at::Tensor tensor, int root, Milliseconds limit) {
  if (tensor.numel() == 0) return;
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
  if (output.numel() == 0) return;
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

// -- sums: to the first rank of each host, between those over gloo, and back. gloo has no int16 and
// sums in the type it is given, so that averages of integers, which are exact, travel as what their
// sums fit in.

void SpanningBackend::sum_between(const at::Tensor& tensor, const ReduceOp& op,
                                  Milliseconds limit) {
  const bool truth = tensor.scalar_type() == at::kBool;
  const bool narrow = tensor.scalar_type() == at::kShort;
  c10d::AllreduceOptions options;
  options.reduceOp = op_between(op, truth);
  options.timeout = limit;
  Tensors flat{truth ? bytes_of(tensor) : tensor.flatten()};
  if (narrow) flat[0] = flat[0].to(at::kInt);
  wait_between(between_->allreduce(flat, options), limit);
  if (narrow) tensor.copy_(flat[0].view(tensor.sizes()));
}

void SpanningBackend::sum(const at::Tensor& tensor, const ReduceOp& op, Milliseconds limit) {
  if (tensor.numel() == 0) return;
  const bool average = op.op_ == ReduceOp::AVG;
  const bool exact = average && !tensor.is_floating_point();
  const ReduceOp plain = average ? ReduceOp(ReduceOp::SUM) : op;
  const at::Tensor terms = exact ? terms_of(tensor, size_) : tensor;
  Tensors one{terms}, result{tensor};
  c10d::ReduceOptions inside;
  inside.reduceOp = plain;
  inside.timeout = limit;
  inside.asyncOp = false;
  local_->reduce(one, inside);
  if (leads()) {
    sum_between(terms, plain, limit);
    if (exact) {
      tensor.copy_(average_of(terms, tensor.scalar_type(), size_));
    } else if (average) {
      tensor.div_(size_);
    }
  }
  c10d::BroadcastOptions back;
  back.timeout = limit;
  back.asyncOp = false;
  local_->broadcast(result, back);
}

// -- c10d's calls

WorkPtr SpanningBackend::start_broadcast(How how, const at::Tensor& tensor, int root) {
  const auto job = [this, tensor, root, limit = how.limit] {
    const at::Tensor flat = tensor.contiguous();
    spread(flat, root, limit);
    if (!flat.is_same(tensor)) at::Tensor(tensor).copy_(flat);
  };
  return start(std::move(how), job);
}

WorkPtr SpanningBackend::start_sum(How how, const Tensors& tensors, const ReduceOp& op) {
  for (const at::Tensor& tensor : tensors) check_reduction(tensor, op);
  const auto job = [this, tensors, op, limit = how.limit] {
    for (const at::Tensor& tensor : tensors) {
      const at::Tensor flat = tensor.contiguous();
      sum(flat, op, limit);
      if (!flat.is_same(tensor)) at::Tensor(tensor).copy_(flat);
    }
  };
  return start(std::move(how), job);
}

WorkPtr SpanningBackend::start_sparse_sum(How how, const at::Tensor& tensor) {
  const auto job = [this, tensor, limit = how.limit] {
    Tensors one{tensor};
    c10d::AllreduceOptions plain;
    plain.timeout = limit;
    wait_between(everyone_->allreduce(one, plain), limit);
  };
  return start(std::move(how), job);
}

WorkPtr SpanningBackend::start_reduce(How how, const at::Tensor& tensor, const ReduceOp& op,
                                      int root) {
  check_reduction(tensor, op);
  const auto job = [this, tensor, op, root, limit = how.limit] {
    const at::Tensor flat = tensor.clone(at::MemoryFormat::Contiguous);
    sum(flat, op, limit);
    if (rank_ == root) at::Tensor(tensor).copy_(flat);
  };
  return start(std::move(how), job);
}

WorkPtr SpanningBackend::start_all_gather(How how, const std::vector<Gathered>& calls) {
  const auto job = [this, calls, limit = how.limit] {
    for (const Gathered& call : calls) {
      const Room room(call.outputs);
      collect(room.memory(), plain(call.input), limit);
      room.settle();
    }
  };
  return start(std::move(how), job);
}

WorkPtr SpanningBackend::start_reduce_scatter(How how, const std::vector<Scattered>& calls,
                                              const ReduceOp& op) {
  for (const Scattered& call : calls) check_reduction(call.output, op);
  const auto job = [this, calls, op, limit = how.limit] {
    for (const Scattered& call : calls) {
      if (call.output.numel() == 0) continue;
      at::Tensor whole = joined(call.inputs);
      if (whole.is_same(call.inputs.whole)) whole = whole.clone();
      sum(whole, op, limit);
      const at::Tensor own = whole.view({size_, -1})[rank_];
      at::Tensor(call.output).copy_(own.view(call.output.sizes()));
    }
  };
  return start(std::move(how), job);
}

// As bytes, as gloo has few dtypes.
WorkPtr SpanningBackend::start_gather(How how, const Gathered& call, int root) {
  const auto job = [this, call, root, limit = how.limit] {
    if (call.input.numel() == 0) return;
    std::optional<Room> room;
    TensorLists outputs;
    if (rank_ == root) {
      room.emplace(call.outputs);
      outputs.push_back(bytes_of(room->memory()).view({size_, -1}).unbind());
    }
    Tensors inputs{bytes_of(plain(call.input))};
    c10d::GatherOptions options;
    options.rootRank = root;
    options.timeout = limit;
    wait_between(everyone_->gather(outputs, inputs, options), limit);
    if (room) room->settle();
  };
  return start(std::move(how), job);
}

WorkPtr SpanningBackend::start_scatter(How how, const Scattered& call, int root) {
  const auto job = [this, call, root, limit = how.limit] {
    if (call.output.numel() == 0) return;
    TensorLists inputs;
    if (rank_ == root) {
      inputs.push_back(bytes_of(joined(call.inputs)).view({size_, -1}).unbind());
    }
    Held held;
    Tensors outputs{bytes_of(held.out_tensor(call.output))};
    c10d::ScatterOptions options;
    options.rootRank = root;
    options.timeout = limit;
    wait_between(everyone_->scatter(outputs, inputs, options), limit);
    held.finish();
  };
  return start(std::move(how), job);
}

// As bytes of one tensor, which is what gloo has.
WorkPtr SpanningBackend::start_all_to_all(How how, const Parts& outputs, const Parts& inputs) {
  const auto job = [this, outputs, inputs, limit = how.limit] {
    const Room room(outputs);
    at::Tensor out = bytes_of(room.memory()), in = bytes_of(joined(inputs));
    Sizes out_sizes(outputs.bytes.begin(), outputs.bytes.end());  // gloo takes them away
    Sizes in_sizes(inputs.bytes.begin(), inputs.bytes.end());
    c10d::AllToAllOptions plain;
    plain.timeout = limit;
    wait_between(everyone_->alltoall_base(out, in, out_sizes, in_sizes, plain), limit);
    room.settle();
  };
  return start(std::move(how), job);
}

WorkPtr SpanningBackend::start_barrier(How how) {
  const auto job = [this, limit = how.limit] {
    sum(at::zeros({1}, at::kInt), ReduceOp(ReduceOp::SUM), limit);
  };
  return start(std::move(how), job);
}

WorkPtr SpanningBackend::start_message(How how, const Message& message) {
  // gloo itself does not look whether there is such a rank.
  if (message.peer == rank_) refuse("expected another rank, found " + std::to_string(rank_));
  if (failed_) {
    // Who failed may not have told why yet.
    const std::optional<Error> told = told_failure();
    throw told ? *told : Error(ErrorCode::kPeerLost, "backend shm: a rank of the group was lost");
  }
  const std::string other =
      message.peer == kAnyRank ? "any rank" : "rank " + std::to_string(message.peer);
  const std::string what = (message.sends ? "send to " : "recv from ") + other + " of the group";
  const auto begin = [&](Tensors one) {
    if (message.sends) return everyone_->send(one, message.peer, message.tag);
    if (message.peer == kAnyRank) return everyone_->recvAnysource(one, message.tag);
    return everyone_->recv(one, message.peer, message.tag);
  };
  Held held;
  const at::Tensor flat =
      message.sends ? held.in_tensor(message.tensor) : held.out_tensor(message.tensor);
  try {
    return c10::make_intrusive<SpanningMessage>(rank_, how.type, begin({flat}), what,
                                                std::move(held));
  } catch (const std::exception& error) {
    rethrow(error, what);
  }
}

}  // namespace cpudist::backends
