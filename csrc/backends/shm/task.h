// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A collective that stops where it must wait for other ranks, so that any thread may go on with it
// and none has to block inside.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

#include "backends/shm/channel.h"

namespace cpudist::shm {

class Task {
 public:
  struct promise_type {
    Condition condition;  // to be met before it can go on
    std::exception_ptr error;
    bool pause = false;  // stop at the next wait, also where there is nothing to wait for

    Task get_return_object() {
      return Task(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() const noexcept { return {}; }
    std::suspend_always final_suspend() const noexcept { return {}; }
    void return_void() const {}
    void unhandled_exception() { error = std::current_exception(); }
  };

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  bool done() const { return handle_.done(); }
  const Condition& condition() const { return handle_.promise().condition; }
  // Runs until it must wait, or is done. Throws what the collective throws.
  void resume(bool pause = false) {
    handle_.promise().pause = pause;
    handle_.resume();
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
  }

 private:
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  std::coroutine_handle<promise_type> handle_;
};

// co_await Until{channel, condition}
struct Until {
  const Channel& channel;
  Condition condition;
  bool after_post = true;  // a place where an asynchronous call is handed over

  bool await_ready() const noexcept { return false; }
  bool await_suspend(std::coroutine_handle<Task::promise_type> handle) const noexcept {
    Task::promise_type& promise = handle.promise();
    promise.condition = condition;
    return (promise.pause && after_post) || !channel.met(condition);
  }
  void await_resume() const noexcept {}
};

}  // namespace cpudist::shm
