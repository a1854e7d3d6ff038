// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How operations are launched and compared, and the operations that collectives are made of.
#include "backends/ccl/backend.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace cpudist::backends::ccl {

namespace {

// Of "ccl:", with which names begin in a profile.
constexpr size_t kTitle = 4;

}  // namespace

CclBackend::CclBackend(std::shared_ptr<Engine> engine, GroupOptions options, bool checks)
    : Backend(options.rank, options.size),
      engine_(std::move(engine)),
      timeout_ms_(options.timeout.count()),
      checks_(checks && options.size > 1) {
  group_ = engine_->make(std::move(options));
  init();
}

CclBackend::~CclBackend() { close(); }

std::shared_ptr<Group> CclBackend::group() const {
  const std::lock_guard lock(group_mutex_);
  return group_;
}

void CclBackend::close() {
  std::shared_ptr<Group> closed;
  {
    const std::lock_guard lock(group_mutex_);
    closed.swap(group_);
  }
  if (closed) engine_->close(std::move(closed));
}

void CclBackend::fail_pairwise() {
  if (auto group = this->group()) engine_->fail_pairwise(std::move(group));
}

void CclBackend::give_up(int peer) {
  if (auto group = this->group()) engine_->give_up(std::move(group), peer);
}

c10::intrusive_ptr<c10d::Backend::Options> CclBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("ccl", Milliseconds(timeout_ms_));
}

CclBackend::Work CclBackend::launch(c10d::OpType type, const char* name, Milliseconds timeout,
                                    std::vector<Part> parts, Tensors outputs, int peer) {
  const std::shared_ptr<Group> group = this->group();
  if (group == nullptr) {
    throw Error(ErrorCode::kClosed, std::string("ccl: ") + (name + kTitle) +
                                        " in a group that was destroyed; make a new group");
  }
  if (timeout <= Milliseconds(0)) timeout = Milliseconds(timeout_ms_);
  ++sequence_;
  auto work =
      c10::make_intrusive<AsyncWork>(getRank(), type, name, parts.size(), std::move(outputs));
  const auto deadline = Clock::now() + timeout;
  for (Part& part : parts) {
    Operation operation;
    operation.group = group;
    operation.name = name;
    operation.name.erase(0, kTitle);
    operation.deadline = deadline;
    operation.peer = peer;
    operation.start = [engine = engine_.get(), start = std::move(part.start)](void* communicator) {
      return start(engine->calls(), communicator);
    };
    operation.finish = [work, after = std::move(part.after)](std::optional<Error> error) {
      if (!error && after) {
        try {
          const at::AutoDispatchBelowADInplaceOrView guard;
          after();
        } catch (const std::exception& caught) {
          error = Error(ErrorCode::kInternal, std::string("ccl: ") + caught.what());
        }
      }
      work->end_part(error);
    };
    engine_->submit(std::move(operation));
  }
  return work;
}

namespace {

// As many numbers in all members, whatever they call.
constexpr size_t kFixed = 5;

const std::vector<const char*>& names() {
  static const std::vector<const char*> kNames = {"all_reduce", "reduce",         "broadcast",
                                                  "all_gather", "reduce_scatter", "all_to_all",
                                                  "gather",     "scatter",        "barrier"};
  return kNames;
}

std::string describe(const int64_t* numbers) {
  std::ostringstream text;
  const auto kind = static_cast<size_t>(numbers[0]);
  text << (kind < names().size() ? names()[kind] : "another collective");
  text << " of " << numbers[4] << " bytes";
  if (numbers[2] >= 0) {
    text << " of " << c10::toString(static_cast<c10::ScalarType>(numbers[2])) << ", "
         << name_of(static_cast<c10d::ReduceOp::RedOpType>(numbers[1]));
  }
  if (numbers[3] >= 0) text << ", root " << numbers[3];
  return text.str();
}

int64_t kind_of(const std::string& name) {
  for (size_t i = 0; i < names().size(); ++i) {
    if (name == names()[i]) return static_cast<int64_t>(i);
  }
  return static_cast<int64_t>(names().size());
}

}  // namespace

void CclBackend::check(const Signature& own) {
  if (!checks_) return;
  const auto size = static_cast<size_t>(getSize());
  const size_t width = kFixed + 2 * size;
  const at::Tensor mine = at::zeros({static_cast<int64_t>(width)}, at::kLong);
  auto* numbers = mine.mutable_data_ptr<int64_t>();
  const int64_t fixed[kFixed] = {kind_of(own.name), own.reduction, own.dtype, own.root,
                                 own.size_bytes};
  std::copy(fixed, fixed + kFixed, numbers);
  std::copy(own.in_bytes.begin(), own.in_bytes.end(), numbers + kFixed);
  std::copy(own.out_bytes.begin(), own.out_bytes.end(), numbers + kFixed + size);
  const at::Tensor all = at::empty({getSize(), static_cast<int64_t>(width)}, mine.options());
  launch(c10d::OpType::_ALLGATHER_BASE, "ccl:comparing calls", c10d::kUnsetTimeout,
         {gather_equal(all, mine)}, {all})
      ->wait();
  const auto* told = all.const_data_ptr<int64_t>();
  const auto me = static_cast<size_t>(getRank());
  for (size_t rank = 0; rank < size; ++rank) {
    const int64_t* other = told + rank * width;
    const bool equal = std::equal(fixed, fixed + kFixed, other);
    const bool fits = other[kFixed + me] == numbers[kFixed + size + rank] &&
                      other[kFixed + size + me] == numbers[kFixed + rank];
    if (equal && fits) continue;
    throw Error(ErrorCode::kConfigMismatch,
                "ccl: ranks disagree about what they call: rank " + std::to_string(me) + " calls " +
                    describe(numbers) + "; rank " + std::to_string(rank) + " calls " +
                    describe(other) +
                    (equal ? ", and one sends what the other does not expect" : ""));
  }
}

void CclBackend::check_root(int64_t root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < getSize(), "ccl: rank ", root, " in a group of ",
                    getSize());
}

Part CclBackend::sum(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const int reduction = reduction_of(tensor, op, "all_reduce");
  const Wire wire = wire_of(tensor, op, "all_reduce");
  const auto count = static_cast<size_t>(wire.buffer.numel());
  void* data = wire.buffer.mutable_data_ptr();
  return Part{[=](const cpudist_ccl_shim& calls, void* communicator) {
                return calls.allreduce(communicator, data, data, count, wire.dtype, reduction);
              },
              [wire, tensor, op, size = getSize()] {
                average(wire.buffer, op, size);
                write_back(wire, tensor);
              }};
}

Part CclBackend::gather_equal(const at::Tensor& output, const at::Tensor& input) {
  const at::Tensor in = contiguous(input);
  const at::Tensor out =
      output.is_contiguous() ? output : at::empty(output.sizes(), output.options());
  return Part{[in, out](const cpudist_ccl_shim& calls, void* communicator) {
                return calls.allgather(communicator, in.const_data_ptr(), in.nbytes(),
                                       out.mutable_data_ptr());
              },
              [in, out, output] {
                if (!out.is_same(output)) output.copy_(out);
              }};
}

Part CclBackend::scatter_sum(const at::Tensor& output, const at::Tensor& input,
                             const c10d::ReduceOp& op) {
  const int reduction = reduction_of(output, op, "reduce_scatter");
  const Wire in = wire_of(input, op, "reduce_scatter");
  const Wire out = wire_of(output, op, "reduce_scatter");
  const auto count = static_cast<size_t>(out.buffer.numel());
  return Part{[=](const cpudist_ccl_shim& calls, void* communicator) {
                return calls.reduce_scatter(communicator, in.buffer.const_data_ptr(),
                                            out.buffer.mutable_data_ptr(), count, out.dtype,
                                            reduction);
              },
              [in, out, output, op, size = getSize()] {
                average(out.buffer, op, size);
                write_back(out, output);
              }};
}

Part CclBackend::exchange(const at::Tensor& output, std::vector<size_t> out_bytes,
                          const at::Tensor& input, std::vector<size_t> in_bytes,
                          std::function<void()> after) {
  return Part{[=](const cpudist_ccl_shim& calls, void* communicator) {
                return calls.alltoall(communicator, input.const_data_ptr(), in_bytes.data(),
                                      output.mutable_data_ptr(), out_bytes.data());
              },
              [input, output, after = std::move(after)] {
                if (after) after();
              }};
}

Part CclBackend::message(const at::Tensor& tensor, int peer, bool sends) {
  const at::Tensor buffer = sends || tensor.is_contiguous()
                                ? contiguous(tensor)
                                : at::empty(tensor.sizes(), tensor.options());
  return Part{[=](const cpudist_ccl_shim& calls, void* communicator) {
                // oneCCL does not write to what it sends.
                void* data = const_cast<void*>(buffer.const_data_ptr());
                return sends ? calls.send(communicator, data, buffer.nbytes(), peer)
                             : calls.receive(communicator, data, buffer.nbytes(), peer);
              },
              [=] {
                if (!sends && !buffer.is_same(tensor)) tensor.copy_(buffer);
              }};
}

}  // namespace cpudist::backends::ccl
