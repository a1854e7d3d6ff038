// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Runs jobs one after the other: in the thread that waits for one if nothing is before it, else in
// a thread of its own.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/process_guard.h"
#include "base/threads.h"
#include "base/wait.h"

namespace cpudist::backends {

class SerialWork : public c10d::Work {
 public:
  SerialWork(int rank, c10d::OpType type, std::vector<at::Tensor> result)
      : Work(rank, type),
        result_(std::move(result)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  std::vector<at::Tensor> result() override { return result_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds limit) override {
    std::unique_lock lock(mutex_);
    const auto done = [this] { return completed_; };
    if (limit == kNoTimeout) {
      cv_.wait(lock, done);
    } else if (!cv_.wait_for(lock, limit, done)) {
      throw Error(ErrorCode::kTimeout, "backend shm: wait: timed out after " +
                                           std::to_string(limit.count()) + " ms; the call goes on");
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }
  void end(std::exception_ptr error) {
    finish(error);
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(result_));
    }
  }

 private:
  std::vector<at::Tensor> result_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Serial {
 public:
  using Job = std::function<void()>;
  using Work = c10::intrusive_ptr<SerialWork>;

  ~Serial() { close(); }

  // With `wait` throws what the job throws.
  void run(const Work& work, Job job, bool wait) {
    guard_.check("a group of backend shm");
    std::unique_lock lock(mutex_);
    if (closed_) {
      throw Error(ErrorCode::kClosed,
                  "backend shm: used after its group was destroyed; make a new group");
    }
    if (wait && jobs_.empty() && !busy_) {
      busy_ = true;
      lock.unlock();
      execute(work, job);
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    } else {
      jobs_.emplace_back(work, std::move(job));
      if (!thread_.joinable()) {
        thread_ = start_thread("the thread of a group of backend shm", [this] { serve(); });
      }
      changed_.notify_all();
    }
    lock.unlock();
    if (wait) work->wait(kNoTimeout);
  }

  // Waits for the end of the job that runs, which its owner hastens; those behind it fail.
  void close() {
    if (guard_.forked()) {
      if (thread_.joinable()) thread_.detach();
      return;
    }
    std::unique_lock lock(mutex_);
    closed_ = true;
    const auto left = std::exchange(jobs_, {});
    changed_.notify_all();
    lock.unlock();
    if (thread_.joinable()) join_thread(thread_);
    for (const auto& [work, job] : left) {
      work->end(std::make_exception_ptr(Error(
          ErrorCode::kClosed, "backend shm: its group was destroyed before this call had ended")));
    }
  }

 private:
  static void execute(const Work& work, const Job& job) {
    std::exception_ptr error;
    try {
      job();
    } catch (...) {
      error = std::current_exception();
    }
    work->end(error);
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (!closed_) {
      if (jobs_.empty() || busy_) {
        changed_.wait(lock);
        continue;
      }
      const auto [work, job] = std::move(jobs_.front());
      jobs_.pop_front();
      busy_ = true;
      lock.unlock();
      execute(work, job);
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  ProcessGuard guard_;
  std::mutex mutex_;
  ConditionVariable changed_;
  std::deque<std::pair<Work, Job>> jobs_;
  bool busy_ = false;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace cpudist::backends
