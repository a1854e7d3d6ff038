// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A lane's life, its sending half and its receiving half: messages to frames.
#include "transport/ranks/lane.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crc32c.h"
#include "base/errors.h"
#include "base/threads.h"

namespace cpudist::transport::ranks {
namespace {

void finish(Transfer& transfer) {
  const std::string trouble = transfer.wait();
  if (!trouble.empty()) throw Error(ErrorCode::kPeerLost, trouble);
}

}  // namespace

thread_local bool Lane::on_receiver_ = false;

void Lane::name_thread() { pthread_setname_np(pthread_self(), "cpudist-lane"); }

Lane::Lane(std::shared_ptr<RankTransport> transport, uint32_t peer, const ChannelLimits& limits,
           std::shared_ptr<BufferPool> pool)
    : transport_(std::move(transport)), peer_(peer), limits_(limits), pool_(std::move(pool)) {}

Lane::~Lane() {
  if (!guard_.forked()) {
    stop();
    return;
  }
  // The threads are the parent's.
  if (sender_.joinable()) sender_.detach();
  if (receiver_.joinable()) receiver_.detach();
}

void Lane::start() {
  const std::string purpose = "a thread of the link to rank " + std::to_string(peer_);
  receiver_ = start_io_thread(purpose, [this] { receive_loop(); });
  try {
    sender_ = start_io_thread(purpose, [this] { send_loop(); });
  } catch (...) {
    stop();
    throw;
  }
}

void Lane::say_goodbye() {
  auto item = std::make_shared<Outbound>();
  encode_prefix({MessageKind::kGoodbye, Side::kServer, 0}, item->message.data());
  item->last = true;
  const std::lock_guard lock(mutex_);
  if (std::exchange(goodbye_, true) || broken_) return;
  queue(std::move(item));
}

void Lane::wait_ended(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [this] { return broken_ || (sent_all_ && peer_ended_); });
}

void Lane::stop() {
  const std::lock_guard stopping(stop_mutex_);
  if (!transport_) return;
  bool ended = false;
  {
    const std::lock_guard lock(mutex_);
    ended = sent_all_ && peer_ended_;
  }
  // Cancelling may end more than this lane: not where both threads have ended by themselves.
  if (!ended) fail("this rank has ended");
  if (sender_.joinable()) sender_.join();
  if (receiver_.joinable()) receiver_.join();
  transport_.reset();
}

void Lane::serve(std::shared_ptr<Port> port) {
  const std::lock_guard lock(mutex_);
  served_ = std::move(port);
}

std::shared_ptr<RankConnection> Lane::connect(const std::shared_ptr<Port>& port) {
  std::shared_ptr<RankConnection> connection;
  std::shared_ptr<RankConnection> older;
  {
    const std::lock_guard lock(mutex_);
    if (broken_ || goodbye_ || peer_ended_) {
      // Who says goodbye may do so because of a rank that died, which is to be named instead.
      throw Error(broken_ ? ErrorCode::kPeerLost : ErrorCode::kClosed,
                  peer_address() + ": " + broken_.value_or("that rank has ended its part") +
                      "; a link over a collective backend cannot be made again");
    }
    connection = std::make_shared<RankConnection>(shared_from_this(), port, ++last_own_);
    older = std::exchange(slot(Side::kClient), connection);
  }
  if (older) older->close_here("replaced by a newer connection");
  if (port->add(connection)) return connection;
  connection->close_here("the connector stopped");
  throw Error(ErrorCode::kClosed, "the connector to " + peer_address() + " is stopped");
}

void Lane::forget(const RankConnection& connection) {
  std::shared_ptr<RankConnection> gone;  // let go without the lock
  const std::lock_guard lock(mutex_);
  auto& held = slot(connection.side());
  if (held.get() == &connection) gone = std::move(held);
}

void Lane::close_connections(const std::string& reason) {
  std::array<std::shared_ptr<RankConnection>, 2> open;
  {
    const std::lock_guard lock(mutex_);
    open.swap(slots_);
  }
  for (const auto& connection : open) {
    if (connection) connection->close_here(reason);
  }
}

void Lane::fail(const std::string& reason) {
  std::deque<OutboundPtr> unsent;
  {
    const std::lock_guard lock(mutex_);
    if (broken_) return;
    broken_ = reason;
    unsent.swap(queue_);
    queued_bytes_ = 0;
    changed_.notify_all();
  }
  // The other thread is in a transfer that may never end.
  transport_->cancel(peer_);
  close_connections(reason);
}

// ---- sending ----

bool Lane::has_room(size_t size_bytes) const {
  const uint64_t cap = limits_.outbound_cap_bytes;
  return queued_bytes_ == 0 || (size_bytes <= cap && queued_bytes_ <= cap - size_bytes);
}

bool Lane::make_room(std::unique_lock<std::mutex>& lock, size_t size_bytes) {
  const auto patience = std::chrono::milliseconds(limits_.outbound_deadline_ms);
  const auto shut = [this] { return broken_ || goodbye_; };
  if (shut()) return false;
  if (has_room(size_bytes)) return true;
  bool frozen = false;
  if (on_receiver_) {
    // This thread takes frames in: it may not wait. Up to twice the cap it goes on queuing.
    if (!full_since_) full_since_ = Clock::now();
    frozen =
        Clock::now() - *full_since_ > patience || queued_bytes_ / 2 > limits_.outbound_cap_bytes;
  } else {
    frozen = !changed_.wait_for(lock, patience, [&] { return shut() || has_room(size_bytes); });
  }
  if (shut()) return false;
  if (!frozen) return true;
  const std::string reason = "frozen: " + std::to_string(queued_bytes_) +
                             " bytes wait to be sent and the peer has not read enough of them in " +
                             std::to_string(patience.count()) + " ms";
  lock.unlock();
  fail(reason);
  return false;
}

void Lane::queue(OutboundPtr item) {
  queued_bytes_ += item->size();
  queue_.push_back(std::move(item));
  changed_.notify_all();
}

bool Lane::post_frame(const std::shared_ptr<RankConnection>& connection, wire::Frame frame) {
  auto item = std::make_shared<Outbound>();
  const Side to = connection->side() == Side::kClient ? Side::kServer : Side::kClient;
  encode_prefix({MessageKind::kFrame, to, connection->number()}, item->message.data());
  frame.header.length = frame.payload.size();
  frame.header.payload_crc = crc32c(frame.payload.data(), frame.payload.size());
  const auto header = wire::encode_header(frame.header);
  std::copy(header.begin(), header.end(), item->message.begin() + kPrefixBytes);
  item->payload = std::move(frame.payload);
  item->connection = connection;
  std::unique_lock lock(mutex_);
  if (!make_room(lock, item->size())) return false;
  queue(std::move(item));
  return true;
}

void Lane::post_close(Side side, uint32_t number) {
  auto item = std::make_shared<Outbound>();
  const Side to = side == Side::kClient ? Side::kServer : Side::kClient;
  encode_prefix({MessageKind::kClose, to, number}, item->message.data());
  const std::lock_guard lock(mutex_);
  if (!broken_ && !goodbye_) queue(std::move(item));
}

Lane::OutboundPtr Lane::next_item() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return broken_ || !queue_.empty(); });
  if (broken_) return nullptr;
  OutboundPtr item = std::move(queue_.front());
  queue_.pop_front();
  return item;
}

void Lane::send_item(const OutboundPtr& item) {
  std::deque<std::pair<std::unique_ptr<Transfer>, size_t>> under_way;
  const size_t size_bytes = item->payload.size();
  const size_t at_once = transport_->at_once();
  size_t started = 0;
  bool first = true;
  under_way.emplace_back(transport_->start_send(peer_, item->message.data(), kMessageBytes, item),
                         0);
  while (!under_way.empty() || started < size_bytes) {
    while (started < size_bytes && under_way.size() < at_once) {
      const size_t piece = std::min(kPieceBytes, size_bytes - started);
      under_way.emplace_back(
          transport_->start_send(peer_, item->payload.data() + started, piece, item), piece);
      started += piece;
    }
    const auto [transfer, piece] = std::move(under_way.front());
    under_way.pop_front();
    const std::string trouble = transfer->wait();
    if (!trouble.empty()) throw Error(ErrorCode::kPeerLost, trouble);
    if (piece == 0) continue;
    // What a backend takes at once is no sign of life; further pieces of a long payload are.
    if (!std::exchange(first, false)) item->connection->count_drained(piece);
  }
}

void Lane::send_loop() {
  name_thread();
  try {
    while (const OutboundPtr item = next_item()) {
      send_item(item);
      const std::lock_guard lock(mutex_);
      if (!broken_) queued_bytes_ -= item->size();
      if (queued_bytes_ <= limits_.outbound_cap_bytes) full_since_.reset();
      sent_all_ = item->last;
      changed_.notify_all();
      if (item->last) return;
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

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
