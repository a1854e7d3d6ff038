// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The handshake of wire/handshake over links of an in-process network with faults, which stands for
// one between hosts: its frames are dropped, repeated, swapped, delayed and cut off as all others
// are. A challenge is sent again until it is answered; a link whose proof is lost ends, and whoever
// made it makes another one.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/wait.h"
#include "transport/channel.h"
#include "wire/handshake/handshake.h"

namespace cpudist::transport::inproc {

// Stands before a listener's handler, who hears of links whose peer has proven the key.
class KeyedHandler final : public ConnectionHandler {
 public:
  KeyedHandler(ConnectionHandler* handler, std::shared_ptr<const wire::Credentials> credentials,
               std::string address)
      : handler_(handler), credentials_(std::move(credentials)), address_(std::move(address)) {}

  void on_open(const std::shared_ptr<Connection>& connection) override;
  void on_frame(const std::shared_ptr<Connection>& connection, wire::Frame frame) override;
  void on_close(const std::shared_ptr<Connection>& connection, const std::string& reason) override;

 private:
  struct Guest {
    wire::ListeningHandshake handshake;
    Buffer challenge;
    wire::Frame answer;
    bool overtaken = false;  // the proof, if it is not lost
  };
  using GuestPtr = std::shared_ptr<Guest>;

  GuestPtr find(const Connection* connection) const;
  void hear(Guest& guest, const std::shared_ptr<Connection>& connection,
            const wire::Frame& frame) const;
  void answer(Guest& guest, const std::shared_ptr<Connection>& connection,
              const wire::Frame& frame) const;

  ConnectionHandler* const handler_;
  const std::shared_ptr<const wire::Credentials> credentials_;
  const std::string address_;
  mutable std::mutex mutex_;
  std::map<const Connection*, GuestPtr> unproven_;
};

// Connects by another one, of which it is the handler, and proves the key before it returns.
class KeyedConnector final : public Connector, public ConnectionHandler {
 public:
  // An answer that is not there after `patience` does not come.
  KeyedConnector(ConnectionHandler* handler, std::shared_ptr<const wire::Credentials> credentials,
                 Clock::duration patience)
      : handler_(handler), credentials_(std::move(credentials)), patience_(patience) {}
  ~KeyedConnector() override { stop(); }
  KeyedConnector(const KeyedConnector&) = delete;
  KeyedConnector& operator=(const KeyedConnector&) = delete;
  void connect_by(std::shared_ptr<Connector> inner) { inner_ = std::move(inner); }

  std::shared_ptr<Connection> connect(const std::string& address, TimePoint deadline) override;
  void stop_attempts() override;
  void stop() override;

  void on_frame(const std::shared_ptr<Connection>& connection, wire::Frame frame) override;
  void on_close(const std::shared_ptr<Connection>& connection, const std::string& reason) override;

 private:
  struct Attempt {
    std::optional<wire::Frame> answer;
    std::optional<std::string> closed;  // why
  };
  wire::Frame answer_to(const wire::Frame& challenge, Connection& link, TimePoint deadline);
  void end_attempt(const Connection* connection);

  ConnectionHandler* const handler_;
  const std::shared_ptr<const wire::Credentials> credentials_;
  const Clock::duration patience_;
  std::shared_ptr<Connector> inner_;
  std::mutex mutex_;
  ConditionVariable changed_;
  std::map<const Connection*, Attempt> attempts_;
  bool stopped_ = false;
};

}  // namespace cpudist::transport::inproc
