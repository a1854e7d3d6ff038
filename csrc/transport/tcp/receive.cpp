// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A connection's receiving half: bytes to frames. Small frames come out of a scratch buffer many at
// a time; a large payload is read straight into its own buffer.

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/crc32c.h"
#include "base/errors.h"
#include "transport/tcp/connection.h"

namespace cpudist::transport::tcp {
namespace {

constexpr size_t kReadBytesAtOnce = 8u << 20;  // then other connections have their turn

}  // namespace

void TcpConnection::on_ready(uint32_t events) {
  try {
    if ((events & EPOLLOUT) != 0) flush();
    if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0 && !closed()) receive();
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

bool TcpConnection::receive() {
  std::vector<uint8_t>& scratch = reactor_->scratch();
  size_t budget = kReadBytesAtOnce;
  while (budget > 0 && !closed()) {
    std::array<iovec, 2> pieces;
    size_t count = 0;
    const size_t missing = dropping() ? 0 : payload_missing();
    if (missing > 0) pieces[count++] = {payload_.data() + payload_have_, missing};
    pieces[count++] = {scratch.data(), scratch.size()};
    // Only this thread closes the socket, so it is open here.
    const ssize_t result = readv(fd_.get(), pieces.data(), static_cast<int>(count));
    if (result < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
      peer_ended_ = true;
      fail("cannot receive: " + describe_errno(errno));
      return false;
    }
    if (result == 0) {
      end_of_stream();
      return false;
    }
    const auto size_bytes = static_cast<size_t>(result);
    bytes_received_.fetch_add(size_bytes, std::memory_order_relaxed);
    const size_t direct = std::min(size_bytes, missing);
    if (direct > 0) take_payload(payload_.data() + payload_have_, direct);
    parse(scratch.data(), size_bytes - direct);
    // Drained; epoll tells when there is more.
    if (size_bytes < missing + scratch.size()) return false;
    budget -= std::min(budget, size_bytes);
  }
  return true;
}

void TcpConnection::parse(const uint8_t* data, size_t size_bytes) {
  while (size_bytes > 0 && !closed()) {
    size_t used = 0;
    if (header_have_ < wire::kHeaderBytes) {
      used = std::min(size_bytes, wire::kHeaderBytes - header_have_);
      std::memcpy(header_bytes_.data() + header_have_, data, used);
      header_have_ += used;
      if (header_have_ == wire::kHeaderBytes) begin_frame();
    } else {
      used = std::min(size_bytes, payload_missing());
      if (!dropping()) std::memcpy(payload_.data() + payload_have_, data, used);
      take_payload(data, used);
    }
    data += used;
    size_bytes -= used;
  }
}

void TcpConnection::begin_frame() {
  const ChannelLimits& limits = options_.limits;
  header_ = wire::decode_header(
      header_bytes_.data(), accepted_ ? limits.payload_limit_bytes : limits.pre_hello_limit_bytes);
  // A server refuses a hello with an error; nothing else may come before the handshake.
  const bool opening = header_.kind == wire::FrameKind::kHello ||
                       (!options_.listener_side && header_.kind == wire::FrameKind::kError);
  if (!accepted_ && !opening) {
    throw Error(ErrorCode::kProtocol, std::string("the first frame must be a hello, found kind ") +
                                          name_of(header_.kind));
  }
  payload_ = options_.handler->payload_memory(header_, options_.pool);
  payload_size_ = static_cast<size_t>(header_.length);
  payload_have_ = 0;
  payload_crc_ = 0;
  if (payload_size_ == 0) finish_frame();
}

void TcpConnection::take_payload(const uint8_t* data, size_t size_bytes) {
  // While the bytes are still in the cache.
  if (!options_.unix_socket) payload_crc_ = crc32c(data, size_bytes, payload_crc_);
  payload_have_ += size_bytes;
  if (payload_missing() == 0) finish_frame();
}

void TcpConnection::finish_frame() {
  if (!options_.unix_socket && payload_crc_ != header_.payload_crc) {
    throw Error(ErrorCode::kProtocol, "the payload of a frame is damaged: expected checksum " +
                                          std::to_string(header_.payload_crc) + ", found " +
                                          std::to_string(payload_crc_));
  }
  wire::Frame frame{header_, Buffer(), dropping()};
  frame.payload = std::exchange(payload_, Buffer());
  header_have_ = 0;
  payload_have_ = 0;
  payload_size_ = 0;
  options_.handler->on_frame(shared_from_this(), std::move(frame));
  if (!closed()) accepted_ = true;
}

void TcpConnection::end_of_stream() {
  peer_ended_ = true;
  if (header_have_ == 0) return fail("the peer closed the connection");
  const size_t have = header_have_ + payload_have_;
  const size_t size = wire::kHeaderBytes + payload_size_;
  fail("the peer closed the connection in the middle of a frame, after " + std::to_string(have) +
       " of " + (header_have_ < wire::kHeaderBytes ? "at least " : "") + std::to_string(size) +
       " bytes");
}

}  // namespace cpudist::transport::tcp
