// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A listener and a connector of one test, and raw sockets that misbehave.

#pragma once

#include <sys/socket.h>

#include <memory>
#include <string>

#include "support/channel_fixture.h"
#include "transport/tcp/channel.h"
#include "transport/tcp/socket.h"

namespace cpudist::testing {

inline transport::ListenOptions listen_options() {
  transport::ListenOptions options;
  options.threads = 2;
  return options;
}

struct TcpPair {
  explicit TcpPair(const transport::ListenOptions& options = listen_options())
      : listener(transport::listen_tcp(options, &server)),
        connector(transport::make_tcp_connector(&client, options.limits)) {}
  ~TcpPair() {
    connector->stop();
    listener->stop();
  }
  std::string address(bool unix_socket) const {
    return listener->addresses().at(unix_socket ? 0 : 1);
  }
  std::shared_ptr<transport::Connection> connect(bool unix_socket) {
    return connector->connect(address(unix_socket), soon());
  }
  // Connected and past the handshake, with an empty hello.
  std::shared_ptr<transport::Connection> greet(bool unix_socket) {
    const size_t before = server.frame_count();
    const auto connection = connect(unix_socket);
    connection->send(make_frame(wire::FrameKind::kHello, 0, 0));
    server.wait_frames(before + 1);
    return connection;
  }
  std::string broken_promises() const {
    return server.broken_promises() + client.broken_promises();
  }

  Recorder server;
  Recorder client;
  std::unique_ptr<transport::Listener> listener;
  std::shared_ptr<transport::Connector> connector;
};

inline Descriptor raw_socket(const std::string& address) {
  const std::atomic<bool> never{false};
  return transport::tcp::connect_socket(transport::tcp::parse_address(address), soon(), never);
}

inline bool raw_send(const Descriptor& fd, const void* data, size_t size_bytes) {
  return send(fd.get(), data, size_bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(size_bytes);
}

}  // namespace cpudist::testing
