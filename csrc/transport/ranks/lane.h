// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What two ranks have in common: one stream of messages each way, a thread that sends what is
// queued and one that receives. Up to two connections use it: this rank's client with the peer's
// server, and the other way round.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/wait.h"
#include "transport/channel.h"
#include "transport/ranks/connection.h"
#include "transport/ranks/message.h"
#include "transport/ranks/transport.h"

namespace cpudist::transport::ranks {

// Memory of received payloads that a network keeps for the next ones.
inline constexpr size_t kPoolBytes = 256u << 20;

class Lane final : public std::enable_shared_from_this<Lane> {
 public:
  Lane(std::shared_ptr<RankTransport> transport, uint32_t peer, const ChannelLimits& limits,
       std::shared_ptr<BufferPool> pool);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void start();
  // Queues the goodbye: nothing can be sent after it.
  void say_goodbye();
  // Until both sides have said goodbye and everything is sent, or the lane is broken.
  void wait_ended(TimePoint deadline);
  // Breaks the lane if it has not ended, joins the threads, lets go of the transport.
  void stop();

  std::string peer_address() const { return "c10d:" + std::to_string(peer_); }
  const ChannelLimits& limits() const { return limits_; }
  // Whose connections the peer may open from now on; null: nobody's.
  void serve(std::shared_ptr<Port> port);
  // Opens this rank's next connection; throws Error(kPeerLost), which no further attempt
  // changes, if the lane is broken, and kClosed if a side has said goodbye.
  std::shared_ptr<RankConnection> connect(const std::shared_ptr<Port>& port);

  // For connections.
  bool post_frame(const std::shared_ptr<RankConnection>& connection, wire::Frame frame);
  void post_close(Side side, uint32_t number);
  void forget(const RankConnection& connection);

 private:
  struct Outbound {
    MessageBytes message{};
    Buffer payload;
    std::shared_ptr<RankConnection> connection;  // null for a message without a payload
    bool last = false;
    size_t size() const { return kMessageBytes + payload.size(); }
  };
  using OutboundPtr = std::shared_ptr<Outbound>;

  static void name_thread();

  // ---- sending ----
  void send_loop();
  void send_item(const OutboundPtr& item);  // throws Error(kPeerLost)
  OutboundPtr next_item();                  // null once the lane is broken
  void queue(OutboundPtr item);             // under the lock
  bool has_room(size_t size_bytes) const;
  bool make_room(std::unique_lock<std::mutex>& lock, size_t size_bytes);

  // ---- receiving ----
  void receive_loop();
  bool receive_message();  // false after a goodbye
  void receive_frame(const Prefix& prefix, const uint8_t* header_bytes);
  // Into `payload`, or past it if it is of another size; returns the CRC-32C.
  uint32_t receive_payload(const Buffer& payload, size_t size_bytes, RankConnection* connection);
  std::shared_ptr<RankConnection> find(const Prefix& prefix);
  std::shared_ptr<RankConnection> open_served(uint32_t number);

  void fail(const std::string& reason);
  void close_connections(const std::string& reason);
  std::shared_ptr<RankConnection>& slot(Side side) { return slots_[static_cast<size_t>(side)]; }

  static thread_local bool on_receiver_;  // this thread takes frames in: it may not wait for room

  std::shared_ptr<RankTransport> transport_;
  const uint32_t peer_;
  const ChannelLimits limits_;
  const std::shared_ptr<BufferPool> pool_;
  const ProcessGuard guard_;
  std::thread sender_;
  std::thread receiver_;
  std::mutex stop_mutex_;

  std::mutex mutex_;
  ConditionVariable changed_;  // the sender, those who wait for room or the end
  std::deque<OutboundPtr> queue_;
  size_t queued_bytes_ = 0;  // what is being sent included
  std::optional<TimePoint> full_since_;
  bool goodbye_ = false;  // queued
  bool sent_all_ = false;
  bool peer_ended_ = false;
  std::optional<std::string> broken_;
  std::array<std::shared_ptr<RankConnection>, 2> slots_;  // by this rank's side
  std::shared_ptr<Port> served_;
  uint32_t last_own_ = 0;     // number of this rank's newest connection
  uint32_t last_served_ = 0;  // of the peer's
};

}  // namespace cpudist::transport::ranks
