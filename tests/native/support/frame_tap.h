// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Between a listener and a server: sees each frame before the server does, and each answer before
// its trainer does. What derives from it may change or drop them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "server/server.h"
#include "transport/channel.h"

namespace cpudist::testing {

// Thread safety: none of its own; it is for threads that run one at a time.
class FrameTap : public transport::ConnectionHandler {
 public:
  using Link = std::shared_ptr<transport::Connection>;

  explicit FrameTap(const server::ServerOptions& options) : server_(options) {}
  server::Server& server() { return server_; }

  void on_open(const Link& connection) override {
    const auto tapped = std::make_shared<Tapped>(connection, *this);
    links_[connection.get()] = tapped;
    server_.on_open(tapped);
  }
  void on_frame(const Link& connection, wire::Frame frame) override {
    const auto found = links_.find(connection.get());
    if (found == links_.end()) return;
    const std::shared_ptr<Tapped> link = found->second;
    if (frame.header.kind == wire::FrameKind::kHello) link->rank = frame.header.rank;
    take(link, std::move(frame));
  }
  void on_close(const Link& connection, const std::string& reason) override {
    const auto found = links_.find(connection.get());
    if (found == links_.end()) return;
    const std::shared_ptr<Tapped> link = found->second;
    links_.erase(found);
    server_.on_close(link, reason);
  }

 protected:
  // A frame has come; deliver() hands it, or another, on.
  virtual void take(const Link& link, wire::Frame frame) { deliver(link, std::move(frame)); }
  void deliver(const Link& link, wire::Frame frame) { server_.on_frame(link, std::move(frame)); }
  // The server has sent this to a trainer. False: it does not get it.
  virtual bool answer(uint32_t, wire::Frame&) { return true; }

 private:
  class Tapped final : public transport::Connection {
   public:
    Tapped(Link inner, FrameTap& tap) : inner_(std::move(inner)), tap_(tap) {}
    bool send(wire::Frame frame) override {
      return !tap_.answer(rank, frame) || inner_->send(std::move(frame));
    }
    void close(const std::string& reason) override { inner_->close(reason); }
    bool closed() const override { return inner_->closed(); }
    std::string peer_address() const override { return inner_->peer_address(); }
    bool reliable() const override { return inner_->reliable(); }
    uint64_t bytes_sent() const override { return inner_->bytes_sent(); }
    uint64_t bytes_received() const override { return inner_->bytes_received(); }
    uint64_t bytes_moved() const override { return inner_->bytes_moved(); }
    uint32_t rank = 0;

   private:
    const Link inner_;
    FrameTap& tap_;
  };

  std::map<const transport::Connection*, std::shared_ptr<Tapped>> links_;
  server::Server server_;  // goes first
};

}  // namespace cpudist::testing
