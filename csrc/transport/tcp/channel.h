// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frames over TCP, or over a unix socket when both ends share a host. One or more epoll threads per
// listener or connector; they block when idle.
#pragma once

#include <memory>
#include <string>

#include "transport/channel.h"
#include "transport/door.h"
#include "transport/flow_limits.h"
#include "wire/handshake/handshake.h"

namespace cpudist::transport {

struct ListenOptions {
  std::string bind_address = "127.0.0.1";  // numeric; never a wildcard by default
  uint16_t port_first = 0;                 // 0 = any; else the first free of the range
  uint16_t port_last = 0;
  bool unix_socket = true;  // also listen on an abstract unix socket
  uint32_t threads = 1;
  ChannelLimits limits;
  // What this end proves, and asks of others before it takes a frame; null: nothing.
  std::shared_ptr<const wire::Credentials> credentials;
  std::shared_ptr<Door> door;  // null: one of its own
  FlowLimits flow;             // of frames that do not get on, in or out
};

// Throws Error(kAddress) naming address, port range and errno. The handler outlives the listener.
std::unique_ptr<Listener> listen_tcp(const ListenOptions& options, ConnectionHandler* handler);
// With credentials both ends prove theirs before connect() returns; it throws
// Error(kAuthentication) where they are not equal.
std::shared_ptr<Connector> make_tcp_connector(
    ConnectionHandler* handler, const ChannelLimits& limits,
    std::shared_ptr<const wire::Credentials> credentials = nullptr);

}  // namespace cpudist::transport
