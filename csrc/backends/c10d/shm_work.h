// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What torch.distributed waits for: one or several calls of backend shm.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backends/shm/group.h"

namespace cpudist::backends {

// Counts the calls of a Work that have ended, and marks its Future, which is made when asked for.
class Completion {
 public:
  Completion(std::vector<at::Tensor> result, size_t calls)
      : result_(std::move(result)), left_(calls) {}

  const std::vector<at::Tensor>& result() const { return result_; }

  void ended(std::exception_ptr error) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard lock(mutex_);
      if (error && !error_) error_ = error;
      if (--left_ != 0) return;
      future = future_;
    }
    if (future) mark(*future);
  }

  c10::intrusive_ptr<c10::ivalue::Future> future() {
    std::unique_lock lock(mutex_);
    if (!future_) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      const bool done = left_ == 0;
      lock.unlock();
      if (done) mark(*future_);
    }
    return future_;
  }

 private:
  void mark(c10::ivalue::Future& future) {
    if (error_) {
      future.setError(error_);
    } else {
      future.markCompleted(c10::IValue(result_));
    }
  }

  std::mutex mutex_;
  std::vector<at::Tensor> result_;
  size_t left_;
  std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class ShmWork : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, std::shared_ptr<shm::Group> group,
          std::shared_ptr<Completion> completion)
      : Work(rank, type), group_(std::move(group)), completion_(std::move(completion)) {}

  void add(std::shared_ptr<shm::Operation> operation) {
    operations_.push_back(std::move(operation));
  }
  void set(std::shared_ptr<shm::Message> message) { message_ = std::move(message); }

  bool isCompleted() override {
    for (const auto& one : operations_) {
      if (!one->done()) return false;
    }
    return message_ == nullptr || message_->done;
  }

  bool isSuccess() const override { return exception() == nullptr; }

  std::exception_ptr exception() const override {
    for (const auto& one : operations_) {
      if (one->error()) return one->error();
    }
    if (message_ != nullptr && message_->done) return message_->error;
    return nullptr;
  }

  int sourceRank() const override { return message_ == nullptr ? -1 : message_->peer; }

  std::vector<at::Tensor> result() override { return completion_->result(); }

  void synchronize() override {}

  // As gloo's: a limit that is over throws, and the call goes on.
  bool wait(std::chrono::milliseconds limit) override {
    std::optional<std::chrono::milliseconds> rest;
    if (limit != kNoTimeout) rest = limit;
    const Clock::time_point end = Clock::now() + limit;
    for (const auto& one : operations_) {
      if (rest) rest = std::max(left(end), std::chrono::milliseconds(0));
      if (!group_->engine.wait(*one, rest)) refuse(limit);
    }
    if (message_ != nullptr && !group_->messages.wait(*message_, rest)) refuse(limit);
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return completion_->future(); }

 private:
  static std::chrono::milliseconds left(Clock::time_point end) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
  }
  [[noreturn]] static void refuse(std::chrono::milliseconds limit) {
    throw Error(ErrorCode::kTimeout, "backend shm: wait: timed out after " +
                                         std::to_string(limit.count()) + " ms; the call goes on");
  }

  std::shared_ptr<shm::Group> group_;
  std::shared_ptr<Completion> completion_;
  std::vector<std::shared_ptr<shm::Operation>> operations_;
  std::shared_ptr<shm::Message> message_;
};

}  // namespace cpudist::backends
