// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A connection handler that records what a channel does and whether it keeps its promises: one
// on_close per connection, no frame after it. Waits have a deadline.

#pragma once

#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/errors.h"
#include "support/patience.h"
#include "transport/channel.h"

namespace cpudist::testing {

inline TimePoint soon() { return Clock::now() + kPatience; }

inline bool mentions(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

inline wire::Frame make_frame(wire::FrameKind kind, uint64_t request_id, size_t size_bytes,
                              uint8_t fill = 1) {
  wire::Frame frame;
  frame.header.kind = kind;
  frame.header.request_id = request_id;
  frame.payload = Buffer(size_bytes);
  for (size_t i = 0; i < size_bytes; ++i) {
    frame.payload.data()[i] = static_cast<uint8_t>(fill + i * 7);
  }
  return frame;
}

inline bool has_fill(const wire::Frame& frame, size_t size_bytes, uint8_t fill = 1) {
  if (frame.payload.size() != size_bytes) return false;
  for (size_t i = 0; i < size_bytes; ++i) {
    if (frame.payload.data()[i] != static_cast<uint8_t>(fill + i * 7)) return false;
  }
  return true;
}

class Recorder : public transport::ConnectionHandler {
 public:
  using Peer = std::shared_ptr<transport::Connection>;
  // Runs inside on_frame, without locks of the recorder.
  std::function<void(const Peer&, wire::Frame&)> on_each;
  bool keep_frames = true;

  void on_open(const Peer& connection) override {
    const std::lock_guard lock(mutex_);
    opened_.push_back(connection);
    changed_.notify_all();
  }
  void on_frame(const Peer& connection, wire::Frame frame) override {
    {
      const std::lock_guard lock(mutex_);
      if (closes_.contains(connection.get())) note("a frame after on_close");
    }
    if (on_each) on_each(connection, frame);
    const std::lock_guard lock(mutex_);
    ++frame_count_;
    if (keep_frames) frames_.push_back(std::move(frame));
    changed_.notify_all();
  }
  void on_close(const Peer& connection, const std::string& reason) override {
    const std::lock_guard lock(mutex_);
    if (!connection->closed()) note("on_close of an open connection");
    if (++closes_[connection.get()] > 1) note("on_close twice");
    reasons_.push_back(reason);
    closed_.push_back(connection);  // so that no address is used again
    changed_.notify_all();
  }

  bool wait_frames(size_t count) {
    return wait([&] { return frame_count_ >= count; });
  }
  bool wait_opened(size_t count) {
    return wait([&] { return opened_.size() >= count; });
  }
  bool wait_closed(size_t count) {
    return wait([&] { return reasons_.size() >= count; });
  }
  size_t frame_count() const {
    const std::lock_guard lock(mutex_);
    return frame_count_;
  }
  size_t closed_count() const {
    const std::lock_guard lock(mutex_);
    return reasons_.size();
  }
  Peer opened(size_t i) const {
    const std::lock_guard lock(mutex_);
    return opened_.at(i);
  }
  std::string reason(size_t i) const {
    const std::lock_guard lock(mutex_);
    return reasons_.at(i);
  }
  std::vector<wire::Frame> take_frames() {
    const std::lock_guard lock(mutex_);
    return std::move(frames_);
  }
  // Empty if every promise was kept.
  std::string broken_promises() const {
    const std::lock_guard lock(mutex_);
    return broken_;
  }

 private:
  template <typename Condition>
  bool wait(const Condition& condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, condition);
  }
  void note(const char* what) { broken_ += std::string(what) + "; "; }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> opened_;
  std::vector<Peer> closed_;
  std::vector<wire::Frame> frames_;
  size_t frame_count_ = 0;
  std::map<const transport::Connection*, int> closes_;
  std::vector<std::string> reasons_;
  std::string broken_;
};

// The error code of what `body` throws, or 0.
template <typename Body>
uint32_t error_code(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return static_cast<uint32_t>(error.code());
  }
  return 0;
}

constexpr uint32_t code(ErrorCode value) { return static_cast<uint32_t>(value); }

}  // namespace cpudist::testing
