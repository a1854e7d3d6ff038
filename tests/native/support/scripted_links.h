// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Attempts to connect that a test decides on, and links whose other end answers hellos and
// heartbeats at once.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/wait.h"
#include "support/channel_fixture.h"
#include "transport/channel.h"
#include "wire/control.h"

namespace cpudist::testing {

// In the address "test:N" is server or trainer N. Never silent: bytes of it move all the time.
class Answering final : public transport::Connection,
                        public std::enable_shared_from_this<Answering> {
 public:
  // `hello`: that the other end answers with; `refusal`: what it says instead.
  Answering(transport::ConnectionHandler* handler, std::string address, wire::Hello hello)
      : handler_(handler), address_(std::move(address)), hello_(std::move(hello)) {
    hello_.shard_id = static_cast<uint32_t>(std::stoul(address_.substr(5)));
  }
  void refuse_with(Error error) { refusal_ = std::make_unique<Error>(std::move(error)); }
  uint64_t beats() const { return beats_; }

  bool send(wire::Frame frame) override {
    if (closed_) return false;
    if (frame.header.kind == wire::FrameKind::kHeartbeat) {
      ++beats_;
    } else if (frame.header.kind == wire::FrameKind::kHello) {
      wire::Frame answer;
      answer.header.kind = refusal_ ? wire::FrameKind::kError : wire::FrameKind::kHello;
      answer.header.run_id = frame.header.run_id;
      answer.header.rank = static_cast<uint16_t>(hello_.shard_id);
      answer.payload =
          refusal_ ? encode(wire::ErrorReply{refusal_->code(), refusal_->what()}) : encode(hello_);
      deliver(std::move(answer));
    }
    return true;
  }
  void close(const std::string& reason) override {
    if (!closed_.exchange(true)) handler_->on_close(shared_from_this(), reason);
  }
  bool closed() const override { return closed_; }
  std::string peer_address() const override { return address_; }
  bool reliable() const override { return true; }
  uint64_t bytes_sent() const override { return 0; }
  uint64_t bytes_received() const override { return 0; }
  uint64_t bytes_moved() const override { return ++moved_; }

 private:
  // As channels do it: what a callback throws ends the link.
  void deliver(wire::Frame frame) {
    try {
      handler_->on_frame(shared_from_this(), std::move(frame));
    } catch (const Error& error) {
      close(error.what());
    }
  }

  transport::ConnectionHandler* const handler_;
  const std::string address_;
  wire::Hello hello_;
  std::unique_ptr<Error> refusal_;
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> beats_{0};
  mutable std::atomic<uint64_t> moved_{0};
};

class Scripted final : public transport::Connector {
 public:
  using Attempt = std::function<std::shared_ptr<transport::Connection>(const std::string&)>;
  explicit Scripted(Attempt attempt) : attempt_(std::move(attempt)) {}
  std::shared_ptr<transport::Connection> connect(const std::string& address,
                                                 TimePoint /*deadline*/) override {
    return attempt_(address);
  }
  void stop_attempts() override { stopped = true; }
  void stop() override {}

  std::atomic<bool> stopped{false};

 private:
  const Attempt attempt_;
};

// What holds within the patience of a test.
template <typename Condition>
bool comes_true(const Condition& condition) {
  const TimePoint deadline = soon();
  while (!condition() && Clock::now() < deadline) let_pass(std::chrono::milliseconds(1));
  return condition();
}

}  // namespace cpudist::testing
