// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/tcp/prove.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/errors.h"

namespace cpudist::transport::tcp {
namespace {

constexpr auto kStopSlice = std::chrono::milliseconds(50);  // how soon stop() is noticed
constexpr uint64_t kAnswerBytesMax = 4096;                  // a handshake, or why there is none

}  // namespace

void Blocking::refuse(const std::string& why) const {
  throw Error(ErrorCode::kAddress, "cannot prove the key to " + address_.text + ": " + why);
}

void Blocking::wait(short events) const {
  while (true) {
    if (stopped_.load()) refuse("the connector stopped");
    const TimePoint now = Clock::now();
    if (now >= deadline_) refuse("no answer within the deadline");
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - now);
    const auto slice = std::min<std::chrono::milliseconds>(left, kStopSlice);
    pollfd entry{socket_.get(), events, 0};
    const int ready = poll(&entry, 1, static_cast<int>(slice.count()));
    if (ready < 0 && errno != EINTR) refuse(describe_errno(errno));
    if (ready > 0) return;
  }
}

void Blocking::send(wire::Frame frame) const {
  frame.header.length = frame.payload.size();
  frame.header.payload_crc =
      address_.unix_socket ? 0 : crc32c(frame.payload.data(), frame.payload.size());
  const auto header = wire::encode_header(frame.header);
  std::vector<uint8_t> bytes(header.begin(), header.end());
  const auto payload = frame.payload.bytes();
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  size_t sent = 0;
  while (sent < bytes.size()) {
    wait(POLLOUT);
    const ssize_t count = ::send(socket_.get(), bytes.data() + sent, bytes.size() - sent,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      sent += static_cast<size_t>(count);
    } else if (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK) {
      refuse(describe_errno(errno));
    }
  }
}

void Blocking::read(std::span<uint8_t> to) const {
  while (!to.empty()) {
    wait(POLLIN);
    const ssize_t count = recv(socket_.get(), to.data(), to.size(), MSG_DONTWAIT);
    if (count == 0) refuse("the other end closed the connection");
    if (count > 0) {
      to = to.subspan(static_cast<size_t>(count));
    } else if (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK) {
      refuse(describe_errno(errno));
    }
  }
}

wire::Frame Blocking::receive() const {
  std::array<uint8_t, wire::kHeaderBytes> header{};
  read(header);
  wire::Frame frame;
  frame.header = wire::decode_header(header.data(), kAnswerBytesMax);
  frame.payload = Buffer(static_cast<size_t>(frame.header.length));
  read({frame.payload.data(), frame.payload.size()});
  const uint32_t found = crc32c(frame.payload.data(), frame.payload.size());
  if (!address_.unix_socket && found != frame.header.payload_crc) {
    throw Error(ErrorCode::kProtocol, "the payload of a frame of " + address_.text + " is damaged");
  }
  return frame;
}

wire::Identity prove(const Blocking& link,
                     const std::shared_ptr<const wire::Credentials>& credentials,
                     const std::string& address) {
  wire::ConnectingHandshake handshake(credentials, address);
  link.send(handshake.challenge());
  const wire::Frame answer = link.receive();
  try {
    link.send(handshake.prove(answer));
    return handshake.peer();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAuthentication) throw;
    // The other end counts and names what it has refused; that it hears of this is no need.
    try {
      if (answer.header.kind == wire::FrameKind::kAuth) {
        link.send(wire::refusal_of(error, credentials->own));
      }
    } catch (const Error&) {
      // The link is broken: the cause is known all the same.
    }
    throw Error(error.code(), address + ": " + error.what());
  }
}

}  // namespace cpudist::transport::tcp
