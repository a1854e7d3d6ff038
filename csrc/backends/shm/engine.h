// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Runs the collectives of one rank of a group, one after the other. Whoever waits for one goes on
// with the first in line; what nobody waits for is gone on with by a thread of the group, which is
// started by the first asynchronous call that cannot end at once.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "backends/shm/buffers.h"
#include "backends/shm/channel.h"
#include "backends/shm/task.h"
#include "base/process_guard.h"
#include "base/wait.h"

namespace cpudist::shm {

class Engine;

// One call. Made by Engine::submit.
class Operation {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Null unless it is done and has failed.
  std::exception_ptr error() const { return done() ? error_ : nullptr; }

 private:
  friend class Engine;
  Call call_;
  std::chrono::milliseconds timeout_{0};
  std::function<void()> finish_;                      // before it is done
  std::function<void(std::exception_ptr)> notified_;  // after
  std::optional<Task> task_;                          // from the first step on
  Clock::time_point deadline_{};
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

struct Submission {
  Call call;
  std::chrono::milliseconds timeout{0};
  bool wait = true;                                     // false: return as soon as possible
  std::function<void()> finish = {};                    // run when it has ended well
  std::function<void(std::exception_ptr)> notify = {};  // run when it has ended
};

class Engine {
 public:
  Engine(Segment segment, int rank, std::vector<int> names, std::chrono::milliseconds timeout);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws Error if the group is broken or closed, or with `wait` if the call fails.
  std::shared_ptr<Operation> submit(Submission submission);
  // Waits at most `limit` (empty: without end, but for the call's own timeout). Returns whether it
  // is done; throws what it failed with.
  bool wait(Operation& operation, std::optional<std::chrono::milliseconds> limit);

  // Memory that all ranks map. Every rank calls it, in the order of its collectives.
  std::shared_ptr<SharedBuffer> allocate(size_t size_bytes, std::chrono::milliseconds timeout);

  Channel& channel() { return channel_; }
  bool forked() const { return guard_.forked(); }
  // Of this process, and not closed. Throws Error(kClosed).
  void check_usable(const char* what) const;
  // Ends what is under way with an error, here and on the other ranks that wait for this one.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  bool step(Lock& lock, const Patience& patience, Clock::time_point until, bool pause);
  void begin(Operation& operation);
  void end(Lock& lock, const std::vector<std::shared_ptr<Operation>>& operations,
           std::exception_ptr error);
  void fail_all(Lock& lock, std::exception_ptr error);
  void start_thread();
  void serve();

  ProcessGuard guard_;
  Buffers buffers_;
  Channel channel_;
  std::mutex mutex_;
  ConditionVariable ended_;  // an operation, or somebody's turn to go on
  ConditionVariable work_;   // for the thread
  std::deque<std::shared_ptr<Operation>> queue_;
  bool driven_ = false;  // somebody goes on with the first in line
  std::atomic<bool> closed_{false};
  std::exception_ptr broken_;
  uint64_t allocations_ = 0;
  std::thread thread_;
};

}  // namespace cpudist::shm
