// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/inproc/keyed.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace cpudist::transport::inproc {

using wire::FrameKind;

namespace {

constexpr auto kRepeatAfter = std::chrono::milliseconds(10);  // of a challenge

}  // namespace

// ---- the end that listens

void KeyedHandler::on_open(const std::shared_ptr<Connection>& connection) {
  auto guest = std::make_shared<Guest>(Guest{{credentials_, address_}, {}, {}, false});
  const std::lock_guard<std::mutex> lock(mutex_);
  unproven_[connection.get()] = std::move(guest);
}

KeyedHandler::GuestPtr KeyedHandler::find(const Connection* connection) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = unproven_.find(connection);
  return found == unproven_.end() ? nullptr : found->second;
}

void KeyedHandler::on_frame(const std::shared_ptr<Connection>& connection, wire::Frame frame) {
  const GuestPtr guest = find(connection.get());
  if (!guest) {
    if (frame.header.kind == FrameKind::kAuth) return;  // it came twice
    return handler_->on_frame(connection, std::move(frame));
  }
  hear(*guest, connection, frame);
  if (!guest->handshake.done()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    unproven_.erase(connection.get());
  }
  handler_->on_open(connection);
}

void KeyedHandler::hear(Guest& guest, const std::shared_ptr<Connection>& connection,
                        const wire::Frame& frame) const {
  const FrameKind kind = frame.header.kind;
  const bool known = guest.handshake.answered();
  if (known && kind != FrameKind::kAuth && kind != FrameKind::kError) {
    if (std::exchange(guest.overtaken, true)) {
      throw Error(ErrorCode::kProtocol, "the proof of a handshake was lost");
    }
    return;  // it is sent again
  }
  try {
    if (kind == FrameKind::kHello) throw wire::no_key_here();
    answer(guest, connection, frame);
  } catch (const Error& error) {
    // Anything else may be a fault's: whoever tries again is let in.
    if (error.code() == ErrorCode::kAuthentication && kind != FrameKind::kError) {
      connection->send(wire::refusal_of(error, credentials_->own));
    }
    throw;
  }
}

void KeyedHandler::answer(Guest& guest, const std::shared_ptr<Connection>& connection,
                          const wire::Frame& frame) const {
  if (!guest.handshake.answered()) {
    guest.answer = guest.handshake.answer(frame);
    guest.challenge = frame.payload.share();
  } else if (!std::ranges::equal(frame.payload.bytes(), guest.challenge.bytes())) {
    return guest.handshake.accept(frame);
  }
  connection->send({guest.answer.header, guest.answer.payload.share()});
}

void KeyedHandler::on_close(const std::shared_ptr<Connection>& connection,
                            const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (unproven_.erase(connection.get()) > 0) return;
  }
  handler_->on_close(connection, reason);
}

// ---- the end that connects

std::shared_ptr<Connection> KeyedConnector::connect(const std::string& address,
                                                    TimePoint deadline) {
  auto link = inner_->connect(address, deadline);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    attempts_[link.get()];
  }
  wire::ConnectingHandshake handshake(credentials_, address);
  try {
    const TimePoint latest = std::min(deadline, Clock::now() + patience_);
    wire::Frame proof = handshake.prove(answer_to(handshake.challenge(), *link, latest));
    end_attempt(link.get());  // what comes from here on is the handler's
    link->send(std::move(proof));
    return link;
  } catch (const std::exception& failed) {
    const auto* error = dynamic_cast<const Error*>(&failed);
    if (error != nullptr && error->code() == ErrorCode::kAuthentication) {
      link->send(wire::refusal_of(*error, credentials_->own));
    }
    link->close("the key is not proven");
    end_attempt(link.get());
    if (error == nullptr) throw;
    throw Error(error->code(), address + ": " + error->what());
  }
}

wire::Frame KeyedConnector::answer_to(const wire::Frame& challenge, Connection& link,
                                      TimePoint deadline) {
  ConditionVariable::Lock lock(mutex_);
  Attempt& attempt = attempts_.at(&link);
  const auto over = [&] { return stopped_ || attempt.answer || attempt.closed; };
  while (!over() && Clock::now() < deadline) {
    lock.unlock();
    link.send({challenge.header, challenge.payload.share()});
    lock.lock();
    if (link.closed() && !attempt.closed) attempt.closed = "closed before its handshake";
    changed_.wait_until(lock, std::min(deadline, Clock::now() + kRepeatAfter), over);
  }
  if (attempt.answer) return std::move(*attempt.answer);
  const std::string why = stopped_         ? "the connector stopped"
                          : attempt.closed ? *attempt.closed
                                           : "no answer within the deadline";
  throw Error(ErrorCode::kAddress, "cannot prove the key: " + why);
}

void KeyedConnector::end_attempt(const Connection* connection) {
  const std::lock_guard<std::mutex> lock(mutex_);
  attempts_.erase(connection);
}

void KeyedConnector::stop_attempts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void KeyedConnector::stop() {
  stop_attempts();
  if (inner_) inner_->stop();
}

void KeyedConnector::on_frame(const std::shared_ptr<Connection>& connection, wire::Frame frame) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = attempts_.find(connection.get()); found != attempts_.end()) {
      // Another one is the same again.
      if (!found->second.answer) found->second.answer = std::move(frame);
      changed_.notify_all();
      return;
    }
  }
  if (frame.header.kind == FrameKind::kAuth) return;  // it came twice
  handler_->on_frame(connection, std::move(frame));
}

void KeyedConnector::on_close(const std::shared_ptr<Connection>& connection,
                              const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = attempts_.find(connection.get()); found != attempts_.end()) {
      found->second.closed = reason;
      changed_.notify_all();
      return;
    }
  }
  handler_->on_close(connection, reason);
}

}  // namespace cpudist::transport::inproc
