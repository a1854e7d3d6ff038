// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The thread that makes all calls of oneCCL in a process. oneCCL moves nothing unless somebody asks
// whether it is done, and knows neither timeouts nor lost peers: the thread does both. Free of
// torch.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backends/ccl/shim/shim.h"
#include "base/clock.h"
#include "base/errors.h"
#include "base/wait.h"

namespace cpudist::backends::ccl {

// Where the members of a group find each other; called on the engine's thread.
class MemberStore {
 public:
  virtual ~MemberStore() = default;
  // Nothing while the key is missing. Both may throw.
  virtual std::optional<std::string> get(const std::string& key) = 0;
  virtual void set(const std::string& key, const std::string& value) = 0;
};

// A member of a group whose process can be looked at, because it runs on this host.
struct Peer {
  int rank = 0;
  int64_t pid = 0;
  // When it was started, in the unit of /proc/<pid>/stat: tells it from a later one of its number.
  uint64_t started = 0;
};

// Whether the process of a peer has ended.
bool has_ended(const Peer& peer);

struct GroupOptions {
  int rank = 0;
  int size = 1;
  int id = 0;
  std::chrono::milliseconds timeout{0};
  std::vector<Peer> peers;
  std::unique_ptr<MemberStore> store;
};

// A communicator and what became of it. Everything in it belongs to the engine's thread.
class Group;

// With whom a collective is.
constexpr int kNoPeer = -1;

// One collective, or one message.
struct Operation {
  std::shared_ptr<Group> group;
  std::string name;
  // Starts it; returns its event, or null if that failed. On the engine's thread.
  std::function<void*(void* communicator)> start;
  // Told the end of it once, with nothing if it went well. On the engine's thread.
  std::function<void(std::optional<Error> error)> finish;
  Clock::time_point deadline;
  // With whom a message is exchanged.
  int peer = kNoPeer;
};

// Operations begin in the order in which they are submitted, and any number of them is in flight.
// An operation that fails or is late makes its group unusable: oneCCL may still write into the
// buffers, which are therefore kept, and members no longer agree on what comes next. In a group
// that fails pairwise, which has messages only, it ends those with the same peer. Thread-safe.
class Engine {
 public:
  // `calls` stay for as long as the engine does.
  explicit Engine(const cpudist_ccl_shim& calls);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Makes a communicator with the other members. Collective; waits for what is in flight before.
  // Throws Error: kTimeout if the members have not come within the timeout, kClosed once it was
  // stopped or in a forked child, kPeerLost.
  std::shared_ptr<Group> make(GroupOptions options);

  void submit(Operation operation);

  // Gives the communicator back; what is in flight on it fails. Does not wait.
  void close(std::shared_ptr<Group> group);

  // From now on failures in this group are of pairs; before its first message.
  void fail_pairwise(std::shared_ptr<Group> group);

  // Fails the messages with a peer, those to come too, in a group that fails pairwise.
  void give_up(std::shared_ptr<Group> group, int peer);

  // Fails what is in flight and ends the thread; later submissions throw Error(kClosed).
  // Idempotent.
  void stop();

  const cpudist_ccl_shim& calls() const { return calls_; }

 private:
  struct Flight {
    Operation operation;
    void* event = nullptr;
  };
  // What is done between operations: making and closing groups.
  struct Job {
    std::function<void()> run;
    // Not before all that is in flight has ended: it keeps the thread from asking for it.
    bool alone = false;
  };
  struct Entry {
    std::optional<Operation> operation;
    Job job;
  };

  void run();
  void push(Entry entry);
  bool is_here() const;
  // Begins what may begin; returns whether something did.
  bool begin(std::deque<Entry>& taken);
  void start(Operation operation);
  // Asks all operations in flight; returns whether one ended.
  bool poll();
  void look_after_the_late();
  bool fail_late(Clock::time_point now);
  void fail_pairs_without_process(Clock::time_point now);
  Error failed(const Operation& operation) const;
  // Of one operation: of its pair, or the whole group.
  void fail_of(Group& group, int peer, const Error& failure);
  void fail(Group& group, const Error& failure);
  void fail_pair(Group& group, int peer, const Error& failure);
  void abandon(Flight flight, const Error& failure);
  // Runs a job on the thread; dropped if that is ending.
  void later(std::function<void()> run);
  void close_now(const std::shared_ptr<Group>& group);
  void pause(std::unique_lock<std::mutex>& lock);

  const cpudist_ccl_shim& calls_;
  int64_t pid_;
  std::mutex mutex_;
  ConditionVariable wake_;
  ConditionVariable made_;  // a group, or none will be
  std::deque<Entry> queue_;
  bool stopping_ = false;
  bool ended_ = false;  // the thread makes nothing any more
  // Of the thread alone.
  std::vector<Flight> flying_;
  std::vector<Flight> abandoned_;
  std::vector<std::shared_ptr<Group>> unusable_;
  Clock::time_point progress_;
  Clock::time_point next_look_;
  std::thread thread_;
};

}  // namespace cpudist::backends::ccl
