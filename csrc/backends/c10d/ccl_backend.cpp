// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// long: one class
// The collectives of c10d, made of those of oneCCL. What only moves data moves bytes, of any dtype.
#include "backends/c10d/ccl_backend.h"

#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>

#include "backends/c10d/async_work.h"

namespace cpudist::backends {

namespace {

using Op = c10d::ReduceOp::RedOpType;

int dtype_of(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kBool:
    case at::kByte:
      return CPUDIST_CCL_UINT8;
    case at::kChar:
      return CPUDIST_CCL_INT8;
    case at::kShort:
      return CPUDIST_CCL_INT16;
    case at::kInt:
      return CPUDIST_CCL_INT32;
    case at::kLong:
      return CPUDIST_CCL_INT64;
    case at::kHalf:
      return CPUDIST_CCL_FLOAT16;
    case at::kFloat:
      return CPUDIST_CCL_FLOAT32;
    case at::kDouble:
      return CPUDIST_CCL_FLOAT64;
    case at::kBFloat16:
      return CPUDIST_CCL_BFLOAT16;
    default:
      TORCH_CHECK_TYPE(
          false, "ccl: ", name, " of ", tensor.scalar_type(),
          " is not supported; expected float16, bfloat16, float32, float64, bool, an ",
          "integer, or (sums) a complex dtype. Convert it, or use gloo for this group");
  }
}

const char* name_of(c10d::ReduceOp::RedOpType op) {
  static constexpr const char* kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                           "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return op < std::size(kNames) ? kNames[op] : "unknown";
}

// What oneCCL gets of a tensor: contiguous, of a dtype that it has.
struct Wire {
  at::Tensor buffer;
  int dtype = 0;
  // Whether the buffer is not the tensor's own memory.
  bool copied = false;
};

int reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* name) {
  const bool truth = tensor.scalar_type() == at::kBool;
  switch (const Op kind = op) {
    case Op::SUM:
      return truth ? CPUDIST_CCL_MAX : CPUDIST_CCL_SUM;
    case Op::AVG:
      TORCH_CHECK_TYPE(tensor.is_floating_point() || tensor.is_complex(), "ccl: ", name,
                       " with AVG of ", tensor.scalar_type(),
                       ": expected a floating dtype. Use SUM");
      return CPUDIST_CCL_SUM;
    case Op::PRODUCT:
      if (!tensor.is_complex()) return truth ? CPUDIST_CCL_MIN : CPUDIST_CCL_PROD;
      break;
    case Op::MIN:
      if (!tensor.is_complex()) return CPUDIST_CCL_MIN;
      break;
    case Op::MAX:
      if (!tensor.is_complex()) return CPUDIST_CCL_MAX;
      break;
    default:
      if (truth && kind == Op::BAND) return CPUDIST_CCL_MIN;
      if (truth && kind == Op::BOR) return CPUDIST_CCL_MAX;
      break;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "ccl: ", name, " with ", name_of(op), " of ",
                              tensor.scalar_type(), " is not supported by oneCCL. Use gloo or shm");
}

// Throws for dtypes and reductions that oneCCL does not have.
Wire wire_of(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* name) {
  reduction_of(tensor, op, name);
  const at::AutoDispatchBelowADInplaceOrView guard;
  Wire wire;
  wire.buffer = tensor.contiguous();
  wire.copied = !wire.buffer.is_same(tensor) || tensor.is_conj();
  if (tensor.is_complex()) wire.buffer = at::view_as_real(wire.buffer.resolve_conj());
  wire.dtype = dtype_of(wire.buffer, name);
  return wire;
}

// Copies a buffer that is not the tensor's own to the tensor.
void write_back(const Wire& wire, const at::Tensor& tensor) {
  if (!wire.copied) return;
  const at::AutoDispatchBelowADInplaceOrView guard;
  tensor.copy_(tensor.is_complex() ? at::view_as_complex(wire.buffer) : wire.buffer);
}

// Divides sums, if an average is asked for.
void average(const at::Tensor& sums, const c10d::ReduceOp& op, int size) {
  if (op == Op::AVG) sums.div_(static_cast<double>(size));
}

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

CclBackend::CclBackend(std::shared_ptr<ccl::Engine> engine, ccl::GroupOptions options, bool checks)
    : FlatBackend("ccl", "ccl", options.rank, options.size, options.timeout),
      engine_(std::move(engine)),
      checks_(checks && options.size > 1) {
  group_ = engine_->make(std::move(options));
  init();
}

CclBackend::~CclBackend() { close(); }

std::shared_ptr<ccl::Group> CclBackend::group() const {
  const std::lock_guard lock(group_mutex_);
  return group_;
}

void CclBackend::close() {
  std::shared_ptr<ccl::Group> closed;
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

WorkPtr CclBackend::launch(How how, std::vector<Part> parts, int peer) {
  const std::shared_ptr<ccl::Group> group = this->group();
  if (group == nullptr) {
    throw Error(ErrorCode::kClosed, std::string("ccl: ") + how.name +
                                        " in a group that was destroyed; make a new group");
  }
  const std::string title = std::string("ccl:") + how.name;  // in a profile
  auto work = c10::make_intrusive<AsyncWork>(getRank(), how.type, title.c_str(), parts.size(),
                                             std::move(how.result));
  const auto deadline = Clock::now() + how.limit;
  for (Part& part : parts) {
    ccl::Operation operation;
    operation.group = group;
    operation.name = how.name;
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
  launch(How{c10d::OpType::_ALLGATHER_BASE, "comparing calls", timeout(), true, {}},
         {gather_equal(all, mine, nullptr)})
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

// -- operations

CclBackend::Signature CclBackend::reduces(const char* name, const at::Tensor& tensor,
                                          const c10d::ReduceOp& op, int64_t root) {
  return {name, static_cast<Op>(op), static_cast<int>(tensor.scalar_type()), root,
          static_cast<int64_t>(tensor.nbytes())};
}

CclBackend::Signature CclBackend::moves(const char* name, const at::Tensor& tensor, int64_t root) {
  return {name, -1, -1, root, static_cast<int64_t>(tensor.nbytes())};
}

std::vector<CclBackend::Part> CclBackend::unless_empty(const at::Tensor& tensor, Part part) {
  std::vector<Part> parts;
  if (tensor.nbytes() > 0) parts.push_back(std::move(part));
  return parts;
}

CclBackend::Part CclBackend::sum(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
  const int reduction = reduction_of(tensor, op, "all_reduce");
  const Wire wire = wire_of(tensor, op, "all_reduce");
  const auto count = static_cast<size_t>(wire.buffer.numel());
  void* data = wire.buffer.mutable_data_ptr();
  return {[=](const cpudist_ccl_shim& calls, void* communicator) {
            return calls.allreduce(communicator, data, data, count, wire.dtype, reduction);
          },
          [wire, tensor, op, size = getSize()] {
            average(wire.buffer, op, size);
            write_back(wire, tensor);
          }};
}

CclBackend::Part CclBackend::gather_equal(const at::Tensor& out, const at::Tensor& in,
                                          std::function<void()> after) {
  return {[in, out](const cpudist_ccl_shim& calls, void* communicator) {
            return calls.allgather(communicator, in.const_data_ptr(), in.nbytes(),
                                   out.mutable_data_ptr());
          },
          std::move(after)};
}

CclBackend::Part CclBackend::exchange(const at::Tensor& out, std::vector<size_t> out_bytes,
                                      const at::Tensor& in, std::vector<size_t> in_bytes,
                                      std::function<void()> after) {
  return {[=](const cpudist_ccl_shim& calls, void* communicator) {
            return calls.alltoall(communicator, in.const_data_ptr(), in_bytes.data(),
                                  out.mutable_data_ptr(), out_bytes.data());
          },
          std::move(after)};
}

// -- c10d's calls

WorkPtr CclBackend::start_sum(How how, const Tensors& tensors, const c10d::ReduceOp& op) {
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors) {
    Part part = sum(tensor, op);
    check(reduces("all_reduce", tensor, op));
    if (tensor.nbytes() > 0) parts.push_back(std::move(part));
  }
  return launch(std::move(how), std::move(parts));
}

WorkPtr CclBackend::start_sparse_sum(How, const at::Tensor&) {
  refuse(
      "all_reduce of a sparse tensor is not supported: exchange its indices and values, or use "
      "gloo or shm");
}

WorkPtr CclBackend::start_reduce(How how, const at::Tensor& tensor, const c10d::ReduceOp& op,
                                 int root) {
  const int reduction = reduction_of(tensor, op, "reduce");
  const Wire wire = wire_of(tensor, op, "reduce");
  check(reduces("reduce", tensor, op, root));
  const bool here = root == getRank();
  const at::Tensor out = here ? wire.buffer : at::empty_like(wire.buffer);
  Part part{[=](const cpudist_ccl_shim& calls, void* communicator) {
              return calls.reduce(communicator, wire.buffer.const_data_ptr(),
                                  out.mutable_data_ptr(), static_cast<size_t>(out.numel()),
                                  wire.dtype, reduction, root);
            },
            [=, size = getSize()] {
              if (!here) return;
              average(wire.buffer, op, size);
              write_back(wire, tensor);
            }};
  return launch(std::move(how), unless_empty(tensor, std::move(part)));
}

WorkPtr CclBackend::start_broadcast(How how, const at::Tensor& tensor, int root) {
  check(moves("broadcast", tensor, root));
  Held held;
  const at::Tensor buffer = held.out_tensor(tensor);
  Part part{[=](const cpudist_ccl_shim& calls, void* communicator) {
              return calls.broadcast(communicator, buffer.mutable_data_ptr(), buffer.nbytes(),
                                     root);
            },
            [held] { held.finish(); }};
  return launch(std::move(how), unless_empty(tensor, std::move(part)));
}

WorkPtr CclBackend::start_all_gather(How how, const std::vector<Gathered>& calls) {
  std::vector<Part> parts;
  for (const Gathered& call : calls) {
    check(moves("all_gather", call.input));
    if (call.input.nbytes() == 0) continue;
    const Room room(call.outputs);
    parts.push_back(gather_equal(room.memory(), plain(call.input), [room] { room.settle(); }));
  }
  return launch(std::move(how), std::move(parts));
}

WorkPtr CclBackend::start_reduce_scatter(How how, const std::vector<Scattered>& calls,
                                         const c10d::ReduceOp& op) {
  std::vector<Part> parts;
  for (const Scattered& call : calls) {
    const int reduction = reduction_of(call.output, op, "reduce_scatter");
    const Wire in = wire_of(joined(call.inputs), op, "reduce_scatter");
    const Wire out = wire_of(call.output, op, "reduce_scatter");
    check(reduces("reduce_scatter", call.output, op));
    if (call.output.nbytes() == 0) continue;
    const auto count = static_cast<size_t>(out.buffer.numel());
    parts.push_back({[=](const cpudist_ccl_shim& shim, void* communicator) {
                       return shim.reduce_scatter(communicator, in.buffer.const_data_ptr(),
                                                  out.buffer.mutable_data_ptr(), count, out.dtype,
                                                  reduction);
                     },
                     [in, out, op, output = call.output, size = getSize()] {
                       average(out.buffer, op, size);
                       write_back(out, output);
                     }});
  }
  return launch(std::move(how), std::move(parts));
}

WorkPtr CclBackend::start_all_to_all(How how, const Parts& outputs, const Parts& inputs) {
  check(Signature{"all_to_all", -1, -1, -1, 0, inputs.bytes, outputs.bytes});
  const Room room(outputs);
  std::vector<Part> parts;
  parts.push_back(exchange(room.memory(), outputs.bytes, joined(inputs), inputs.bytes,
                           [room] { room.settle(); }));
  return launch(std::move(how), std::move(parts));
}

WorkPtr CclBackend::start_gather(How how, const Gathered& call, int root) {
  check(moves("gather", call.input, root));
  std::vector<size_t> in_bytes(static_cast<size_t>(getSize()), 0);
  in_bytes[static_cast<size_t>(root)] = call.input.nbytes();
  if (getRank() == root) {
    const Room room(call.outputs);
    Part part = exchange(room.memory(), call.outputs.bytes, plain(call.input), in_bytes,
                         [room] { room.settle(); });
    return launch(std::move(how), unless_empty(call.input, std::move(part)));
  }
  // A place for the address, where nothing comes.
  const at::Tensor nothing = at::empty({1}, call.input.options());
  Part part = exchange(nothing, std::vector<size_t>(in_bytes.size(), 0), plain(call.input),
                       in_bytes, nullptr);
  return launch(std::move(how), unless_empty(call.input, std::move(part)));
}

WorkPtr CclBackend::start_scatter(How how, const Scattered& call, int root) {
  check(moves("scatter", call.output, root));
  std::vector<size_t> out_bytes(static_cast<size_t>(getSize()), 0);
  out_bytes[static_cast<size_t>(root)] = call.output.nbytes();
  const bool here = getRank() == root;
  const at::Tensor in = here ? joined(call.inputs) : at::empty({1}, call.output.options());
  std::vector<size_t> in_bytes =
      here ? call.inputs.bytes : std::vector<size_t>(out_bytes.size(), 0);
  Held held;
  const at::Tensor out = held.out_tensor(call.output);
  Part part = exchange(out, out_bytes, in, std::move(in_bytes), [held] { held.finish(); });
  return launch(std::move(how), unless_empty(call.output, std::move(part)));
}

WorkPtr CclBackend::start_barrier(How how) {
  check(Signature{"barrier"});
  std::vector<Part> parts;
  parts.push_back({[](const cpudist_ccl_shim& calls, void* communicator) {
                     return calls.barrier(communicator);
                   },
                   nullptr});
  return launch(std::move(how), std::move(parts));
}

WorkPtr CclBackend::start_message(How how, const Message& message) {
  TORCH_CHECK_NOT_IMPLEMENTED(message.peer != kAnyRank,
                              "ccl: recv from any rank is not supported by oneCCL. Name the ",
                              "rank, or use gloo for this group");
  TORCH_CHECK_NOT_IMPLEMENTED(message.tag == 0, "ccl: ", how.name, " with tag ", message.tag,
                              ": oneCCL has no tags; messages between two ranks arrive in the ",
                              "order in which they are sent. Use tag 0, or gloo or shm");
  if (message.peer == getRank()) {
    refuse(std::string(how.name) + " between rank " + std::to_string(getRank()) + " and itself");
  }
  Held held;
  const at::Tensor buffer =
      message.sends ? held.in_tensor(message.tensor) : held.out_tensor(message.tensor);
  Part part{[buffer, sends = message.sends, peer = message.peer](const cpudist_ccl_shim& calls,
                                                                 void* communicator) {
              // oneCCL does not write to what it sends.
              void* data = const_cast<void*>(buffer.const_data_ptr());
              return sends ? calls.send(communicator, data, buffer.nbytes(), peer)
                           : calls.receive(communicator, data, buffer.nbytes(), peer);
            },
            [held] { held.finish(); }};
  return launch(std::move(how), unless_empty(message.tensor, std::move(part)), message.peer);
}

}  // namespace cpudist::backends
