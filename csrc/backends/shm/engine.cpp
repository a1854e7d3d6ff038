// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The line of calls of one rank, and who goes on with them.
#include "backends/shm/engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backends/shm/collectives.h"
#include "backends/shm/turns.h"
#include "base/threads.h"

namespace cpudist::shm {

namespace {

// Asynchronous calls up to here go on in the caller's thread as far as they can without waiting.
constexpr size_t kInlineBytes = size_t{64} << 10;

}  // namespace

Engine::Engine(Segment segment, int rank, std::vector<int> names, std::chrono::milliseconds timeout)
    : channel_(std::move(segment), rank, std::move(names), timeout) {}

Engine::~Engine() { close(); }

void Engine::check_usable(const char* what) const {
  guard_.check(what);
  if (closed_) {
    throw Error(ErrorCode::kClosed,
                "backend shm: used after its group was destroyed; make a new group");
  }
}

std::shared_ptr<Operation> Engine::submit(Submission submission) {
  check_usable("a group of backend shm");
  auto operation = std::make_shared<Operation>();
  operation->call_ = std::move(submission.call);
  operation->timeout_ = submission.timeout;
  operation->finish_ = std::move(submission.finish);
  operation->notified_ = std::move(submission.notify);
  Lock lock(mutex_);
  check_usable("a group of backend shm");
  if (broken_) std::rethrow_exception(broken_);
  queue_.push_back(operation);
  if (submission.wait) {
    lock.unlock();
    wait(*operation, std::nullopt);
    return operation;
  }
  if (queue_.size() == 1 && !driven_) {
    const bool pause = operation->call_.size_bytes() > kInlineBytes;
    step(lock, Patience{}, Clock::time_point{}, pause);
  }
  if (!operation->done()) {
    start_thread();
    work_.notify_one();
  }
  return operation;
}

bool Engine::wait(Operation& operation, std::optional<std::chrono::milliseconds> limit) {
  Lock lock(mutex_);
  const bool done = drive_until(
      lock, ended_, limit, [&] { return operation.done(); },
      [this] { return driven_ || closed_; },  // close() ends what is left
      [&](Clock::time_point until) { step(lock, channel_.caller_patience(), until, false); });
  lock.unlock();
  if (!done) return false;
  if (operation.error_) std::rethrow_exception(operation.error_);
  return true;
}

void Engine::begin(Operation& operation) {
  operation.deadline_ = Clock::now() + operation.timeout_;
  operation.task_ = make_task(channel_, buffers_, operation.call_);
}

// Goes on with the first in line until it is done or `until`. Called and left with the lock held,
// which is not held meanwhile.
bool Engine::step(Lock& lock, const Patience& patience, Clock::time_point until, bool pause) {
  const std::shared_ptr<Operation> operation = queue_.front();
  driven_ = true;
  lock.unlock();
  std::exception_ptr error;
  bool done = false;
  try {
    channel_.throw_if_broken();
    if (!operation->task_) {
      begin(*operation);
      operation->task_->resume(pause);
    }
    while (!operation->task_->done() && !channel_.stopping()) {
      const Condition condition = operation->task_->condition();
      if (until == Clock::time_point{}) break;
      if (channel_.wait(condition, patience, std::min(until, operation->deadline_))) {
        operation->task_->resume();
      } else if (Clock::now() >= operation->deadline_) {
        throw channel_.late(condition, name_of(operation->call_.kind), operation->timeout_);
      } else {
        break;
      }
    }
    done = operation->task_->done();
    if (done && operation->finish_) operation->finish_();
  } catch (...) {
    error = std::current_exception();
  }
  if (error) channel_.break_group(error);
  lock.lock();
  driven_ = false;
  if (error) {
    fail_all(lock, error);
  } else if (done) {
    queue_.pop_front();
    end(lock, {operation}, nullptr);
  }
  ended_.notify_all();
  if (!queue_.empty() && thread_.joinable()) work_.notify_one();
  return done;
}

// Ends operations that are out of the line. Called and left with the lock held; it is not held
// while others are told and tensors are let go, which may wait for Python's lock.
void Engine::end(Lock& lock, const std::vector<std::shared_ptr<Operation>>& operations,
                 std::exception_ptr error) {
  struct Rest {
    std::optional<Task> task;
    std::function<void()> finish;
    std::function<void(std::exception_ptr)> notify;
  };
  std::vector<Rest> rests;
  for (const auto& operation : operations) {
    rests.push_back({std::move(operation->task_), std::exchange(operation->finish_, nullptr),
                     std::exchange(operation->notified_, nullptr)});
    operation->task_.reset();
    operation->error_ = error;
    operation->done_.store(true, std::memory_order_release);
  }
  ended_.notify_all();
  lock.unlock();
  for (const Rest& rest : rests) {
    if (rest.notify) rest.notify(error);
  }
  rests.clear();
  lock.lock();
}

void Engine::fail_all(Lock& lock, std::exception_ptr error) {
  broken_ = error;
  const auto failed = std::exchange(queue_, {});
  end(lock, {failed.begin(), failed.end()}, error);
}

void Engine::start_thread() {
  if (thread_.joinable()) return;
  thread_ = ::cpudist::start_thread("the thread of a group of backend shm", [this] { serve(); });
}

void Engine::serve() {
  Lock lock(mutex_);
  while (!closed_) {
    if (queue_.empty() || driven_) {
      work_.wait(lock);
    } else {
      step(lock, channel_.engine_patience(), Clock::now() + kTurn, false);
    }
  }
}

std::shared_ptr<SharedBuffer> Engine::allocate(size_t size_bytes,
                                               std::chrono::milliseconds timeout) {
  check_usable("a group of backend shm");
  const int size = channel_.size(), rank = channel_.rank();
  auto buffer = std::make_shared<SharedBuffer>();
  buffer->size_bytes = size_bytes;
  buffer->rank = rank;
  buffer->parts.resize(static_cast<size_t>(size));
  SharedMemory& own = buffer->parts[static_cast<size_t>(rank)];
  own = SharedMemory::create(size_bytes);
  const int64_t told[3] = {static_cast<int64_t>(size_bytes), ::getpid(), own.fd()};
  std::vector<int64_t> all(static_cast<size_t>(size) * 3);
  Call call;
  call.kind = Kind::kAllGather;
  call.dtype = DType::kI64;
  call.count = 3;
  call.in = told;
  for (int one = 0; one < size; ++one) call.outs.push_back(all.data() + one * 3);
  submit({call, timeout});
  bool opened = true;
  for (int one = 0; one < size; ++one) {
    const int64_t* other = all.data() + one * 3;
    if (static_cast<size_t>(other[0]) != size_bytes) {
      throw Error(ErrorCode::kConfigMismatch,
                  "backend shm: ranks allocate different sizes: " + channel_.name(rank) + " " +
                      std::to_string(size_bytes) + " bytes, " + channel_.name(one) + " " +
                      std::to_string(other[0]) + ". Make them equal on all ranks.");
    }
    if (one == rank) continue;
    auto& part = buffer->parts[static_cast<size_t>(one)];
    part = SharedMemory::open(static_cast<int>(other[1]), static_cast<int>(other[2]), size_bytes);
    opened = opened && static_cast<bool>(part);
  }
  // All have opened all, or nobody uses it.
  int32_t good = opened ? 1 : 0;
  Call agree;
  agree.kind = Kind::kAllReduce;
  agree.dtype = DType::kI32;
  agree.reduction = Reduction::kMin;
  agree.count = 1;
  agree.in = agree.out = &good;
  submit({agree, timeout});
  own.seal();
  if (good == 0) {
    throw Error(ErrorCode::kOverloaded,
                "backend shm: a rank could not map the memory of another; allow the "
                "processes more memory (ulimit -v, the container's limits)");
  }
  buffer->id = ++allocations_;
  buffers_.add(buffer);
  return buffer;
}

void Engine::close() {
  if (guard_.forked()) {
    // The thread is the parent's: there is nothing to join here.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  Lock lock(mutex_);
  if (closed_) return;
  closed_ = true;
  channel_.stop();
  while (driven_) ended_.wait_for(lock, std::chrono::milliseconds(50));
  fail_all(lock, std::make_exception_ptr(
                     Error(ErrorCode::kClosed,
                           "backend shm: its group was destroyed before this call had ended")));
  work_.notify_all();
  ended_.notify_all();
  lock.unlock();
  if (thread_.joinable()) join_thread(thread_);
}

}  // namespace cpudist::shm
