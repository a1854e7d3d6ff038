// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The c10d work of a collective that another thread ends.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "base/errors.h"

namespace cpudist::backends {

// Ends when all of its parts have. Its future, which DDP needs, holds the outputs. Thread-safe.
class AsyncWork final : public c10d::Work {
 public:
  AsyncWork(int rank, c10d::OpType type, const char* name, size_t parts,
            std::vector<at::Tensor> outputs)
      : Work(rank, type, name),
        parts_(parts),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    if (parts == 0) end();
  }

  // Ends a part, which failed if there is an error.
  void end_part(const std::optional<Error>& error) {
    if (error) {
      const std::lock_guard lock(error_mutex_);
      if (!error_) error_ = error;
    }
    if (parts_.fetch_sub(1) == 1) end();
  }

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  void end() {
    if (!error_) {
      finish();
      future_->markCompleted(c10::IValue(outputs_));
    } else {
      const auto error = std::make_exception_ptr(*error_);
      finish(error);
      future_->setError(error);
    }
  }

  std::atomic<size_t> parts_;
  std::mutex error_mutex_;
  std::optional<Error> error_;
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace cpudist::backends
