// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A listener and a connector of one test, and raw sockets that misbehave.

#pragma once

#include <sys/socket.h>

#include <memory>
#include <string>

#include "channel_fixture.h"
#include "core/tcp_channel.h"
#include "core/tcp_socket.h"

namespace cpudist::testing {

inline core::ListenOptions listen_options() {
  core::ListenOptions options;
  options.threads = 2;
  return options;
}

struct TcpPair {
  explicit TcpPair(const core::ListenOptions& options = listen_options())
      : listener(core::listen_tcp(options, &server)),
        connector(core::make_tcp_connector(&client, options.limits)) {}
  ~TcpPair() {
    connector->stop();
    listener->stop();
  }
  std::string address(bool unix_socket) const {
    return listener->addresses().at(unix_socket ? 0 : 1);
  }
  std::shared_ptr<core::Connection> connect(bool unix_socket) {
    return connector->connect(address(unix_socket), soon());
  }
  // Connected and past the handshake, with an empty hello.
  std::shared_ptr<core::Connection> greet(bool unix_socket) {
    const size_t before = server.frame_count();
    const auto connection = connect(unix_socket);
    connection->send(make_frame(core::FrameKind::kHello, 0, 0));
    server.wait_frames(before + 1);
    return connection;
  }
  std::string broken_promises() const {
    return server.broken_promises() + client.broken_promises();
  }

  Recorder server;
  Recorder client;
  std::unique_ptr<core::Listener> listener;
  std::shared_ptr<core::Connector> connector;
};

inline core::tcp::UniqueFd raw_socket(const std::string& address) {
  const std::atomic<bool> never{false};
  return core::tcp::connect_socket(core::tcp::parse_address(address), soon(), never);
}

inline bool raw_send(const core::tcp::UniqueFd& fd, const void* data, size_t size_bytes) {
  return send(fd.get(), data, size_bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(size_bytes);
}

}  // namespace cpudist::testing
