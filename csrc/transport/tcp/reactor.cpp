// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The epoll loop.

#include "transport/tcp/reactor.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/errors.h"
#include "base/threads.h"

namespace cpudist::transport::tcp {
namespace {

constexpr size_t kScratchBytes = 64 * 1024;
constexpr size_t kEventsAtOnce = 64;
constexpr uint64_t kWakeToken = 0;

thread_local const Reactor* current_reactor = nullptr;

[[noreturn]] void fail(const char* what) {
  throw Error(ErrorCode::kInternal, std::string(what) + ": " + describe_errno(errno));
}

}  // namespace

Reactor::Reactor()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      scratch_(kScratchBytes) {
  if (epoll_.get() < 0) fail("epoll_create1");
  if (wake_.get() < 0) fail("eventfd");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeToken;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) fail("epoll_ctl");
  thread_ = start_io_thread("an I/O thread", [this] { run(); });
}

Reactor::~Reactor() {
  if (guard_.forked()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  stop();
}

bool Reactor::on_reactor_thread() { return current_reactor != nullptr; }

void Reactor::wake() {
  const uint64_t one = 1;
  // Fails only when the counter is at its maximum, and then the thread is awake.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

bool Reactor::post(Task task) {
  if (guard_.forked()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopped_) return false;
  tasks_.push_back(std::move(task));
  if (tasks_.size() == 1) wake();
  return true;
}

void Reactor::stop() {
  if (guard_.forked()) return;
  if (current_reactor == this) {
    throw Error(ErrorCode::kInternal, "stop() was called from one of the channel's callbacks");
  }
  const std::lock_guard<std::mutex> stopping(stop_mutex_);
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  wake();
  join_thread(thread_);
}

void Reactor::change(int fd, uint64_t token, uint32_t events) {
  if (guard_.forked()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

uint64_t Reactor::watch(int fd, std::shared_ptr<Source> source, uint32_t events) {
  const uint64_t token = next_token_++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  sources_.emplace(token, std::move(source));
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    sources_.erase(token);
    fail("epoll_ctl");
  }
  return token;
}

void Reactor::forget(int fd, uint64_t token) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  sources_.erase(token);
}

bool Reactor::later(const Timer& a, const Timer& b) {
  return a.when != b.when ? a.when > b.when : a.order > b.order;
}

void Reactor::schedule(TimePoint when, Task task) {
  timers_.push_back({when, next_order_++, std::move(task)});
  std::push_heap(timers_.begin(), timers_.end(), later);
}

int Reactor::timeout_ms() const {
  if (timers_.empty()) return -1;
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(timers_.front().when - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 3'600'000));
}

void Reactor::run_timers() {
  while (!timers_.empty() && timers_.front().when <= Clock::now()) {
    std::pop_heap(timers_.begin(), timers_.end(), later);
    const Task task = std::move(timers_.back().task);
    timers_.pop_back();
    task();
  }
}

void Reactor::run_tasks() {
  std::vector<Task> tasks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const Task& task : tasks) task();
}

void Reactor::wait_and_dispatch() {
  std::array<epoll_event, kEventsAtOnce> events;
  const int count =
      epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms());
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.u64 == kWakeToken) {
      uint64_t ignored;
      [[maybe_unused]] const ssize_t bytes = read(wake_.get(), &ignored, sizeof(ignored));
      continue;
    }
    const auto found = sources_.find(event.data.u64);
    if (found == sources_.end()) continue;  // forgotten earlier in this batch
    const std::shared_ptr<Source> keep = found->second;
    keep->on_ready(event.events);
  }
}

void Reactor::run() {
  current_reactor = this;
  while (true) {
    wait_and_dispatch();
    run_tasks();
    run_timers();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) break;
  }
  run_tasks();
  std::vector<std::pair<uint64_t, std::shared_ptr<Source>>> left(sources_.begin(), sources_.end());
  for (const auto& [token, source] : left) {
    if (!source->on_stop()) sources_.erase(token);
  }
  while (!sources_.empty()) {
    wait_and_dispatch();
    run_timers();
  }
  timers_.clear();
}

}  // namespace cpudist::transport::tcp
