// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/ranks/connection.h"

#include <utility>
#include <vector>

#include "base/errors.h"
#include "transport/ranks/lane.h"

namespace cpudist::transport::ranks {

bool Port::add(const std::shared_ptr<RankConnection>& connection) {
  const std::lock_guard lock(mutex_);
  if (!stopped_) connections_.insert(connection);
  return !stopped_;
}

void Port::remove(const std::shared_ptr<RankConnection>& connection) {
  const std::lock_guard lock(mutex_);
  connections_.erase(connection);
}

void Port::stop(const std::string& reason) {
  std::vector<std::shared_ptr<RankConnection>> open;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    // They take themselves out once on_close has returned: a second stop() waits for it too.
    open.assign(connections_.begin(), connections_.end());
  }
  for (const auto& connection : open) {
    connection->close(reason);
    connection->wait_closed();
  }
}

RankConnection::RankConnection(std::shared_ptr<Lane> lane, std::shared_ptr<Port> port,
                               uint32_t number)
    : lane_(std::move(lane)),
      port_(std::move(port)),
      number_(number),
      peer_address_(lane_->peer_address()) {}

bool RankConnection::send(wire::Frame frame) {
  guard_.check("connection");
  if (closed()) return false;
  const size_t size_bytes = kMessageBytes + frame.payload.size();
  // Counted first: on a fast lane the answer may be there before this thread goes on.
  bytes_sent_.fetch_add(size_bytes, std::memory_order_relaxed);
  if (lane_->post_frame(shared_from_this(), std::move(frame))) return true;
  bytes_sent_.fetch_sub(size_bytes, std::memory_order_relaxed);
  return false;
}

void RankConnection::close(const std::string& reason) {
  if (guard_.forked() || closed()) return;
  lane_->post_close(side(), number_);
  close_here(reason);
}

bool RankConnection::enter() {
  const std::lock_guard lock(mutex_);
  if (closed()) return false;
  running_ = true;
  return true;
}

void RankConnection::leave() {
  {
    const std::lock_guard lock(mutex_);
    running_ = false;
  }
  finish_close();
}

void RankConnection::open() {
  if (!enter()) return;
  try {
    port_->handler()->on_open(shared_from_this());
  } catch (const std::exception& error) {
    close(error.what());
  }
  leave();
}

Buffer RankConnection::begin_frame(const wire::FrameHeader& header,
                                   const std::shared_ptr<BufferPool>& pool) {
  const bool server = side() == Side::kServer;
  // A server refuses a hello with an error; nothing else may come before the handshake.
  const bool opening =
      header.kind == wire::FrameKind::kHello || (!server && header.kind == wire::FrameKind::kError);
  if (!accepted_ && !opening) {
    throw Error(ErrorCode::kProtocol,
                std::string("the first frame must be a hello, found kind ") + name_of(header.kind));
  }
  const uint64_t limit = lane_->limits().pre_hello_limit_bytes;
  if (!accepted_ && header.length > limit) {
    throw Error(ErrorCode::kProtocol, "the first frame has " + std::to_string(header.length) +
                                          " bytes of payload, at most " + std::to_string(limit) +
                                          " are expected");
  }
  if (header.length == 0) return Buffer();
  return port_->handler()->payload_memory(header, pool);
}

void RankConnection::deliver(wire::Frame frame) {
  if (!enter()) return;
  try {
    port_->handler()->on_frame(shared_from_this(), std::move(frame));
    accepted_ = true;
  } catch (const std::exception& error) {
    close(error.what());
  }
  leave();
}

void RankConnection::close_here(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (closed()) return;
    reason_ = reason;
    closed_.store(true, std::memory_order_release);
  }
  lane_->forget(*this);
  finish_close();
}

void RankConnection::finish_close() {
  {
    const std::lock_guard lock(mutex_);
    if (!closed() || running_ || close_started_) return;
    close_started_ = true;
  }
  const auto keep = shared_from_this();
  try {
    port_->handler()->on_close(keep, reason_);
  } catch (const std::exception&) {
    // Nobody is left to tell: the connection is gone.
  }
  {
    const std::lock_guard lock(mutex_);
    close_done_ = true;
    changed_.notify_all();
  }
  port_->remove(keep);
}

void RankConnection::wait_closed() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return close_done_; });
}

}  // namespace cpudist::transport::ranks
