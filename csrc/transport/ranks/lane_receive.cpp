// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A lane's receiving half: messages to frames.

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crc32c.h"
#include "base/errors.h"
#include "transport/ranks/lane.h"

namespace cpudist::transport::ranks {
namespace {

void finish(Transfer& transfer) {
  const std::string trouble = transfer.wait();
  if (!trouble.empty()) throw Error(ErrorCode::kPeerLost, trouble);
}

}  // namespace

void Lane::receive_loop() {
  name_thread();
  on_receiver_ = true;
  try {
    while (receive_message()) {
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

bool Lane::receive_message() {
  const auto message = std::make_shared<MessageBytes>();
  finish(*transport_->start_receive(peer_, message->data(), message->size(), message));
  const Prefix prefix = decode_prefix(message->data());
  switch (prefix.kind) {
    case MessageKind::kFrame:
      receive_frame(prefix, message->data() + kPrefixBytes);
      return true;
    case MessageKind::kClose:
      if (const auto connection = find(prefix)) {
        connection->close_here("the peer closed the connection");
      }
      return true;
    case MessageKind::kGoodbye:
      break;
  }
  close_connections("the peer has ended its part");
  // Its answer lets the peer end without waiting.
  say_goodbye();
  const std::lock_guard lock(mutex_);
  peer_ended_ = true;
  changed_.notify_all();
  return false;
}

std::shared_ptr<RankConnection> Lane::find(const Prefix& prefix) {
  const std::lock_guard lock(mutex_);
  const auto& held = slot(prefix.to);
  return held && held->number() == prefix.connection ? held : nullptr;
}

std::shared_ptr<RankConnection> Lane::open_served(uint32_t number) {
  std::shared_ptr<RankConnection> connection;
  std::shared_ptr<RankConnection> older;
  std::shared_ptr<Port> port;
  {
    const std::lock_guard lock(mutex_);
    // Frames of a connection that is closed here were under way.
    if (number <= last_served_ || broken_) return nullptr;
    last_served_ = number;
    port = served_;
    if (port) {
      connection = std::make_shared<RankConnection>(shared_from_this(), port, number);
      older = std::exchange(slot(Side::kServer), connection);
    }
  }
  if (older) older->close_here("replaced by a newer connection");
  if (connection && port->add(connection)) {
    connection->open();
    return connection;
  }
  // Nobody serves here, or not any more.
  post_close(Side::kServer, number);
  if (connection) forget(*connection);
  return nullptr;
}

void Lane::receive_frame(const Prefix& prefix, const uint8_t* header_bytes) {
  // A damaged header leaves no way to find the next message: that breaks the lane.
  const wire::FrameHeader header = wire::decode_header(header_bytes, limits_.payload_limit_bytes);
  auto connection = find(prefix);
  if (!connection && prefix.to == Side::kServer) connection = open_served(prefix.connection);
  Buffer payload;
  if (connection) {
    connection->count_received(kMessageBytes);
    try {
      payload = connection->begin_frame(header, pool_);
    } catch (const Error& error) {
      connection->close(error.what());
      connection.reset();
    }
  }
  const auto size_bytes = static_cast<size_t>(header.length);
  const uint32_t found = receive_payload(payload, size_bytes, connection.get());
  if (!connection) return;
  if (found != header.payload_crc) {
    connection->close("the payload of a frame is damaged: expected checksum " +
                      std::to_string(header.payload_crc) + ", found " + std::to_string(found));
    return;
  }
  const bool dropped = payload.size() != size_bytes;
  connection->deliver(wire::Frame{header, std::move(payload), dropped});
}

uint32_t Lane::receive_payload(const Buffer& payload, size_t size_bytes,
                               RankConnection* connection) {
  struct Piece {
    std::unique_ptr<Transfer> transfer;
    uint8_t* data;
    size_t size_bytes;
  };
  const bool thrown_away = payload.size() != size_bytes;
  // Pieces that nobody wants share memory: one is under way at a time.
  const auto owner = std::make_shared<Buffer>(
      thrown_away ? Buffer(std::min(size_bytes, kPieceBytes)) : payload.share());
  const size_t at_once = thrown_away ? 1 : transport_->at_once();
  std::deque<Piece> under_way;
  size_t started = 0;
  uint32_t crc = 0;
  while (started < size_bytes || !under_way.empty()) {
    while (started < size_bytes && under_way.size() < at_once) {
      const size_t piece = std::min(kPieceBytes, size_bytes - started);
      uint8_t* data = owner->data() + (thrown_away ? 0 : started);
      under_way.push_back({transport_->start_receive(peer_, data, piece, owner), data, piece});
      started += piece;
    }
    const Piece piece = std::move(under_way.front());
    under_way.pop_front();
    finish(*piece.transfer);
    crc = crc32c(piece.data, piece.size_bytes, crc);
    if (connection != nullptr) connection->count_received(piece.size_bytes);
  }
  return crc;
}

}  // namespace cpudist::transport::ranks
