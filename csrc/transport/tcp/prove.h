// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The connecting end of a handshake, before the socket becomes a connection.
#pragma once

#include <atomic>
#include <memory>
#include <span>

#include "transport/tcp/socket.h"
#include "wire/handshake/handshake.h"

namespace cpudist::transport::tcp {

// Whole frames over a connected socket, by a thread that waits. All that is read is a frame: not a
// byte more. Throws Error(kAddress) for a link that breaks or is silent, kProtocol.
class Blocking {
 public:
  Blocking(const Descriptor& socket, const Address& address, TimePoint deadline,
           const std::atomic<bool>& stopped)
      : socket_(socket), address_(address), deadline_(deadline), stopped_(stopped) {}

  void send(wire::Frame frame) const;
  wire::Frame receive() const;

 private:
  void wait(short events) const;
  void read(std::span<uint8_t> to) const;
  [[noreturn]] void refuse(const std::string& why) const;

  const Descriptor& socket_;
  const Address& address_;
  const TimePoint deadline_;
  const std::atomic<bool>& stopped_;
};

// Returns who has proven to be there. Throws Error(kAuthentication), which names the address and
// the cause, and what Blocking throws.
wire::Identity prove(const Blocking& link,
                     const std::shared_ptr<const wire::Credentials>& credentials,
                     const std::string& address);

}  // namespace cpudist::transport::tcp
