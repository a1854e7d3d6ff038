// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One end of a connection over a lane. The lane's receiver delivers, any thread sends and closes.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "base/process_guard.h"
#include "base/wait.h"
#include "transport/channel.h"
#include "transport/ranks/message.h"

namespace cpudist::transport::ranks {

class Lane;
class RankConnection;

// A listener's or connector's handler and its open connections, so that it can close them.
// Thread-safe.
class Port {
 public:
  Port(Side side, ConnectionHandler* handler) : side_(side), handler_(handler) {}
  Side side() const { return side_; }
  ConnectionHandler* handler() const { return handler_; }
  bool add(const std::shared_ptr<RankConnection>& connection);  // false once stopped
  void remove(const std::shared_ptr<RankConnection>& connection);
  // Closes every connection and waits for the last callback. Not from a callback.
  void stop(const std::string& reason);

 private:
  const Side side_;
  ConnectionHandler* const handler_;
  std::mutex mutex_;
  bool stopped_ = false;
  std::set<std::shared_ptr<RankConnection>> connections_;
};

class RankConnection final : public Connection,
                             public std::enable_shared_from_this<RankConnection> {
 public:
  RankConnection(std::shared_ptr<Lane> lane, std::shared_ptr<Port> port, uint32_t number);

  bool send(wire::Frame frame) override;
  void close(const std::string& reason) override;
  bool closed() const override { return closed_.load(std::memory_order_acquire); }
  std::string peer_address() const override { return peer_address_; }
  bool reliable() const override { return true; }
  uint64_t bytes_sent() const override { return bytes_sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_received() const override {
    return bytes_received_.load(std::memory_order_relaxed);
  }
  uint64_t bytes_moved() const override {
    return bytes_received() + bytes_drained_.load(std::memory_order_relaxed);
  }

  Side side() const { return port_->side(); }
  uint32_t number() const { return number_; }
  void count_received(size_t size_bytes) {
    bytes_received_.fetch_add(size_bytes, std::memory_order_relaxed);
  }
  void count_drained(size_t size_bytes) {
    bytes_drained_.fetch_add(size_bytes, std::memory_order_relaxed);
  }

  // The lane's receiver only. `begin_frame` gives the memory for a payload, of another size if
  // there is none to spare; throws Error(kProtocol) for a frame that may not come now.
  void open();
  Buffer begin_frame(const wire::FrameHeader& header, const std::shared_ptr<BufferPool>& pool);
  void deliver(wire::Frame frame);

  // Without telling the peer. on_close runs once no other callback does, in the thread that left
  // last.
  void close_here(const std::string& reason);
  void wait_closed();  // returns when on_close has returned

 private:
  bool enter();
  void leave();
  void finish_close();

  const std::shared_ptr<Lane> lane_;
  const std::shared_ptr<Port> port_;
  const uint32_t number_;
  const std::string peer_address_;
  const ProcessGuard guard_;
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> bytes_received_{0};
  std::atomic<uint64_t> bytes_drained_{0};
  bool accepted_ = false;  // the receiver's: the handler took the first frame

  std::mutex mutex_;
  ConditionVariable changed_;
  std::string reason_;
  bool running_ = false;  // a callback
  bool close_started_ = false;
  bool close_done_ = false;
};

}  // namespace cpudist::transport::ranks
