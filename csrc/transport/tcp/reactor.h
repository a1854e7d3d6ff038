// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One epoll thread: readiness of file descriptors, tasks from other threads, timers. It blocks
// while there is nothing to do.
#pragma once

#include <sys/epoll.h>

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/process_guard.h"
#include "transport/channel.h"
#include "transport/tcp/socket.h"

namespace cpudist::transport::tcp {

class Reactor {
 public:
  // Called on the reactor's thread only.
  class Source {
   public:
    virtual ~Source() = default;
    virtual void on_ready(uint32_t events) = 0;
    // The reactor stops. True asks for more calls of on_ready, until the source is forgotten; it
    // must be within a short time.
    virtual bool on_stop() = 0;
  };
  using Task = std::function<void()>;

  Reactor();
  ~Reactor();
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  // Any thread. Tasks accepted before stop() run; false afterwards.
  bool post(Task task);
  // Any thread. Ends the thread: what was posted runs, then every source's on_stop, and those that
  // asked for it may end on their own.
  void stop();
  // Any thread, while `fd` is watched under `token`.
  void change(int fd, uint64_t token, uint32_t events);

  // On the reactor's thread. `watch` throws Error(kInternal) if the kernel refuses.
  uint64_t watch(int fd, std::shared_ptr<Source> source, uint32_t events);
  void forget(int fd, uint64_t token);
  void schedule(TimePoint when, Task task);
  // Space for reading that is valid until the callback returns.
  std::vector<uint8_t>& scratch() { return scratch_; }

  // True on the thread of any reactor: such a thread must not wait for a peer.
  static bool on_reactor_thread();

 private:
  struct Timer {
    TimePoint when;
    uint64_t order;
    Task task;
  };
  static bool later(const Timer& a, const Timer& b);
  void run();
  void wait_and_dispatch();
  void run_tasks();
  void run_timers();
  int timeout_ms() const;
  void wake();

  ProcessGuard guard_;
  Descriptor epoll_;
  Descriptor wake_;
  std::vector<uint8_t> scratch_;
  std::vector<Timer> timers_;  // a heap
  uint64_t next_order_ = 0;
  uint64_t next_token_ = 1;
  std::unordered_map<uint64_t, std::shared_ptr<Source>> sources_;

  std::mutex mutex_;  // what other threads touch
  std::vector<Task> tasks_;
  bool stopped_ = false;

  std::mutex stop_mutex_;
  std::thread thread_;
};

}  // namespace cpudist::transport::tcp
