// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A link inside one process: two ends that hand frames to each other's handler.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/process_guard.h"
#include "base/wait.h"
#include "transport/channel.h"

namespace cpudist::transport::inproc {

class FaultSchedule;
class Link;

// The links of one listener or connector, so that it can close them, in the order in which they
// were made: the same run of a schedule closes them as another does. Thread-safe.
class Home {
 public:
  bool add(const std::shared_ptr<Link>& link);  // false once stopped
  void remove(const std::shared_ptr<Link>& link);
  std::vector<std::shared_ptr<Link>> stop();  // hands over what is still open

 private:
  std::mutex mutex_;
  bool stopped_ = false;
  std::vector<std::shared_ptr<Link>> links_;
};

class End final : public Connection {
 public:
  bool send(wire::Frame frame) override;
  void close(const std::string& reason) override;
  bool closed() const override { return closed_.load(std::memory_order_acquire); }
  std::string peer_address() const override { return peer_address_; }
  bool reliable() const override;
  uint64_t bytes_sent() const override { return bytes_sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_moved() const override { return bytes_received(); }
  uint64_t bytes_received() const override {
    return bytes_received_.load(std::memory_order_relaxed);
  }

  // Runs on_open of this end's handler.
  void open();
  // Runs on_frame of this end's handler in this thread; false if the end is closed.
  bool deliver(wire::Frame frame);
  // Closes this end only; on_close runs once no other callback does, in the thread that left last.
  void close_here(const std::string& reason);
  // Returns when on_close has returned. Not from a callback.
  void wait_closed();

 private:
  friend class Link;
  friend class FaultSchedule;
  bool enter();
  void leave();
  void finish_close();
  std::shared_ptr<Connection> self() const;
  End& peer() const;

  Link* link_ = nullptr;  // contains this end
  ConnectionHandler* handler_ = nullptr;
  std::weak_ptr<Home> home_;
  std::string peer_address_;
  ProcessGuard guard_;
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> bytes_received_{0};

  std::mutex mutex_;
  ConditionVariable changed_;
  std::string reason_;
  int running_ = 0;  // callbacks
  bool close_started_ = false;
  bool close_done_ = false;
};

// Owns both ends; a shared pointer to an end keeps the link.
class Link final : public std::enable_shared_from_this<Link> {
 public:
  struct Side {
    ConnectionHandler* handler;
    std::shared_ptr<Home> home;
  };
  // `faults` may be null: frames are then handed over by the sender.
  static std::shared_ptr<Link> create(const std::string& address, const Side& client,
                                      const Side& server, std::shared_ptr<FaultSchedule> faults);
  End& client() { return ends_[0]; }
  End& server() { return ends_[1]; }
  std::shared_ptr<Connection> share(const End& end);

 private:
  friend class End;
  friend class FaultSchedule;
  // What a fault schedule knows of the frames towards one end; guarded by its mutex.
  struct Lane {
    TimePoint last{};
    bool holding = false;
    uint64_t held_id = 0;
    wire::Frame held;
  };
  Lane& lane_to(const End& end) { return lanes_[&end == &ends_[0] ? 0 : 1]; }

  End ends_[2];
  Lane lanes_[2];
  std::shared_ptr<FaultSchedule> faults_;
};

}  // namespace cpudist::transport::inproc
