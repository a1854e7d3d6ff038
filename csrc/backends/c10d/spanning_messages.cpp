// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Messages of a group over several hosts: gloo's, with errors of our types. They are not in the
// serial order: gloo pairs messages by their tags, which its collectives do not use. One that fails
// leaves the group as it is: links to other ranks may be whole.
#include <string>
#include <utility>

#include "backends/c10d/spanning_backend.h"
#include "backends/foreign_errors.h"

namespace cpudist::backends {

using c10d::OpType;

namespace {

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
    if (!std::exchange(finished_, true)) held_.finish();
    return true;
  }

 private:
  WorkPtr work_;
  std::string what_;
  Held held_;
  bool finished_ = false;
};

}  // namespace

// gloo itself does not look whether there is such a rank.
WorkPtr SpanningBackend::message(OpType type, const Tensors& tensors, int peer,
                                 const std::function<WorkPtr(Tensors&)>& begin) {
  check_tensor(only(tensors));
  const bool any = type == OpType::RECVANYSOURCE;
  if (!any && (peer < 0 || peer >= size_ || peer == rank_)) {
    refuse("expected another rank below " + std::to_string(size_) + ", found " +
           std::to_string(peer));
  }
  if (failed_) {
    // Who failed may not have told why yet.
    const std::optional<Error> told = told_failure();
    throw told ? *told : Error(ErrorCode::kPeerLost, "backend shm: a rank of the group was lost");
  }
  const std::string from = any ? "any rank" : "rank " + std::to_string(peer);
  const std::string what =
      (type == OpType::SEND ? "send to " : "recv from ") + from + " of the group";
  Held held;
  Tensors flat{type == OpType::SEND ? held.in_tensor(tensors[0]) : held.out_tensor(tensors[0])};
  try {
    return c10::make_intrusive<SpanningMessage>(rank_, type, begin(flat), what, std::move(held));
  } catch (const std::exception& error) {
    rethrow(error, what);
  }
}

WorkPtr SpanningBackend::send(Tensors& tensors, int peer, int tag) {
  check_tag(tag);
  return message(OpType::SEND, tensors, peer,
                 [&](Tensors& flat) { return everyone_->send(flat, peer, tag); });
}

WorkPtr SpanningBackend::recv(Tensors& tensors, int peer, int tag) {
  check_tag(tag);
  return message(OpType::RECV, tensors, peer,
                 [&](Tensors& flat) { return everyone_->recv(flat, peer, tag); });
}

WorkPtr SpanningBackend::recvAnysource(Tensors& tensors, int tag) {
  check_tag(tag);
  return message(OpType::RECVANYSOURCE, tensors, -1,
                 [&](Tensors& flat) { return everyone_->recvAnysource(flat, tag); });
}

}  // namespace cpudist::backends
