// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A connection that records what a server sends over it, and has no other end.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/channel.h"

namespace cpudist::testing {

class FakeConnection final : public transport::Connection {
 public:
  explicit FakeConnection(std::string address) : address_(std::move(address)) {}
  bool send(wire::Frame frame) override {
    const std::lock_guard lock(mutex_);
    if (closed_ && !late_) return false;
    frames_.push_back(std::move(frame));
    sender_ = std::this_thread::get_id();
    sent_.notify_all();
    return true;
  }
  void close(const std::string& reason) override {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    reason_ = reason;
    sent_.notify_all();
  }
  bool closed() const override {
    const std::lock_guard lock(mutex_);
    return closed_;
  }
  std::string peer_address() const override {
    if (address_error_) std::rethrow_exception(address_error_);
    return address_;
  }
  Descriptor peer_process() override { return std::move(process_); }
  // What stands for the pidfd of who is at the other end; has ended once it is readable.
  void set_process(Descriptor process) { process_ = std::move(process); }
  bool reliable() const override { return true; }
  uint64_t bytes_sent() const override { return 10; }
  uint64_t bytes_received() const override { return 20; }
  uint64_t bytes_moved() const override { return moved_; }
  void move_bytes() { ++moved_; }
  // From now on whoever asks for the address gets this thrown.
  void fail_address(std::exception_ptr error) { address_error_ = std::move(error); }

  // As if frames were answered just before it is closed, which another thread does.
  void answer_late() { late_ = true; }
  std::string reason() const {  // why it was closed
    const std::lock_guard lock(mutex_);
    return reason_;
  }

  // False at the deadline.
  bool wait_for_answer(uint64_t request_id, TimePoint deadline) const {
    std::unique_lock lock(mutex_);
    return sent_.wait_until(lock, deadline, [&] {
      return std::any_of(frames_.begin(), frames_.end(), [&](const wire::Frame& frame) {
        return frame.header.request_id == request_id;
      });
    });
  }
  bool wait_for_close(TimePoint deadline) const {
    std::unique_lock lock(mutex_);
    return sent_.wait_until(lock, deadline, [&] { return closed_; });
  }

  std::thread::id sender() const {  // of the last frame
    const std::lock_guard lock(mutex_);
    return sender_;
  }

  // Copies of the frames that answer a request, oldest first.
  void forget() {  // what was sent
    const std::lock_guard lock(mutex_);
    frames_.clear();
  }
  std::vector<wire::Frame> answers(uint64_t request_id) const {
    const std::lock_guard lock(mutex_);
    std::vector<wire::Frame> found;
    for (const wire::Frame& frame : frames_) {
      if (frame.header.request_id != request_id) continue;
      found.push_back(
          wire::Frame{frame.header, frame.payload.empty() ? Buffer() : frame.payload.share()});
    }
    return found;
  }

 private:
  const std::string address_;
  std::exception_ptr address_error_;
  Descriptor process_;
  mutable std::mutex mutex_;
  mutable std::condition_variable sent_;
  bool closed_ = false;
  std::atomic<bool> late_{false};
  std::string reason_;
  std::vector<wire::Frame> frames_;
  std::thread::id sender_;
  std::atomic<uint64_t> moved_{0};
};

}  // namespace cpudist::testing
