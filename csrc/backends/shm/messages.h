// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Messages between two ranks: a ring of bytes in each direction, in order; receives are matched by
// tag, and what nobody has asked for yet is kept when something behind it is wanted. A send has
// ended when its bytes are in the ring. Whoever waits moves what can be moved, of all calls; a
// thread does it for calls that nobody waits for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "backends/shm/channel.h"
#include "backends/shm/types.h"
#include "base/process_guard.h"
#include "base/wait.h"

namespace cpudist::shm {

constexpr int kAnySource = -1;

// One send or receive.
struct Message {
  bool sends = false;
  int peer = 0;  // kAnySource: a receive from whoever comes first; then from whom it came
  int64_t tag = 0;
  std::byte* data = nullptr;
  size_t size_bytes = 0;
  DType dtype = DType::kBytes;  // the same at both ends
  std::chrono::milliseconds timeout{0};
  std::function<void()> finish;                    // when it has ended well, before it is done
  std::function<void(std::exception_ptr)> notify;  // when it is done

  Clock::time_point deadline{};
  size_t moved = 0;  // bytes of it
  bool begun = false;
  std::exception_ptr error;  // of one that is done
  std::atomic<bool> done{false};
};

class Messages {
 public:
  explicit Messages(Channel& channel);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // Throws Error if the group is broken or closed.
  void submit(const std::shared_ptr<Message>& message);
  // As Engine::wait.
  bool wait(Message& message, std::optional<std::chrono::milliseconds> limit);
  // From now on a rank that is lost, late or has given up ends the messages with it, and no others.
  // Before the first message, on all ranks.
  void fail_pairwise();
  // Ends the messages with a rank, those to come too, on both sides. After fail_pairwise().
  void give_up(int peer);
  // Ends what is under way with an error; after Channel::stop().
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  // In front of each message in a ring.
  struct Head {
    int64_t tag;
    uint64_t size_bytes;
    DType dtype;
  };
  struct Kept {
    Head head;
    std::vector<std::byte> data;
  };
  // What has come from one rank.
  struct Inbox {
    std::optional<Head> head;        // of the message in front of the ring
    std::shared_ptr<Message> into;   // it is being read into this one
    std::vector<std::byte> keeping;  // or into this
    size_t read = 0;                 // bytes of it
    std::list<Kept> kept;            // that nobody has asked for yet
  };

  bool move();
  bool move_sends(int peer);
  bool move_receives(int peer);
  bool take_kept();
  bool begin_receive(Inbox& inbox, int peer);
  std::shared_ptr<Message> wanted(int peer, int64_t tag) const;
  bool wants_from(int peer) const;
  void check_alike(const Message& message, int peer, const Head& head) const;
  size_t write(int to, const void* data, size_t size_bytes);
  size_t read(int from, void* data, size_t size_bytes);
  size_t readable(int from) const;
  void finish(const std::shared_ptr<Message>& message, std::exception_ptr error);
  void step(Lock& lock, const Patience& patience, Clock::time_point until);
  template <typename Visit>
  void visit_pending(const Visit& visit) const;
  Clock::time_point soonest_deadline() const;
  void check_pending();
  void check(const Message& message) const;
  void check_there(int peer) const;
  void check_any_source() const;
  void lose(int peer, const std::exception_ptr& error);
  void fail_all(const std::exception_ptr& error);
  void notify_ended(Lock& lock);
  void serve();

  ProcessGuard guard_;
  Channel& channel_;
  mutable std::mutex mutex_;
  ConditionVariable ended_, work_;
  std::vector<std::deque<std::shared_ptr<Message>>> sends_;  // by peer, in order
  std::list<std::shared_ptr<Message>> receives_;             // in order
  std::vector<Inbox> inboxes_;
  std::vector<std::shared_ptr<Message>> ended_messages_;  // whose callers are not told yet
  bool pairwise_ = false;
  std::vector<std::exception_ptr> lost_;  // by peer, if pairwise
  Clock::time_point next_look_{};
  bool driven_ = false;
  bool closed_ = false;
  std::exception_ptr broken_;
  std::thread thread_;
};

}  // namespace cpudist::shm
