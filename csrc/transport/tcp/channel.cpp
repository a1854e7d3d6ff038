// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The client side: connecting to the first address that answers is up to the caller, one address is
// tried here.

#include "transport/tcp/channel.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/prove.h"

namespace cpudist::transport {
namespace tcp {
namespace {

class TcpConnector final : public Connector {
 public:
  TcpConnector(ConnectionHandler* handler, const ChannelLimits& limits,
               std::shared_ptr<const wire::Credentials> credentials)
      : reactor_(std::make_shared<Reactor>()), credentials_(std::move(credentials)) {
    options_.handler = handler;
    options_.limits = limits;
    options_.pool = std::make_shared<BufferPool>(kPoolBytes);
  }
  ~TcpConnector() override { stop(); }
  TcpConnector(const TcpConnector&) = delete;
  TcpConnector& operator=(const TcpConnector&) = delete;

  std::shared_ptr<Connection> connect(const std::string& text, TimePoint deadline) override {
    guard_.check("connector");
    const Address address = parse_address(text);
    if (address.unix_socket && address.boot_id != boot_id()) {
      throw Error(ErrorCode::kAddress, "cannot connect to " + text + ": it is on another host");
    }
    Descriptor fd = connect_socket(address, deadline, stopped_);
    if (address.unix_socket) check_same_user(fd.get());
    tune(fd.get(), address.unix_socket, options_.limits);
    ConnectionOptions options = options_;
    options.peer_address = text;
    options.unix_socket = address.unix_socket;
    if (credentials_) {
      const auto limit = std::chrono::milliseconds(options_.limits.handshake_deadline_ms);
      const TimePoint latest = std::min(deadline, Clock::now() + limit);
      options.peer = prove(Blocking(fd, address, latest, stopped_), credentials_, address.text);
    }
    const auto connection =
        std::make_shared<TcpConnection>(std::move(fd), reactor_, std::move(options));
    if (!reactor_->post([connection] { connection->start(); })) {
      throw Error(ErrorCode::kClosed, "the connector to " + text + " is stopped");
    }
    return connection;
  }

  void stop_attempts() override { stopped_.store(true); }
  void stop() override {
    stop_attempts();
    reactor_->stop();
  }

 private:
  ProcessGuard guard_;
  std::shared_ptr<Reactor> reactor_;
  ConnectionOptions options_;
  const std::shared_ptr<const wire::Credentials> credentials_;
  std::atomic<bool> stopped_{false};
};

}  // namespace
}  // namespace tcp

std::shared_ptr<Connector> make_tcp_connector(
    ConnectionHandler* handler, const ChannelLimits& limits,
    std::shared_ptr<const wire::Credentials> credentials) {
  return std::make_shared<tcp::TcpConnector>(handler, limits, std::move(credentials));
}

}  // namespace cpudist::transport
