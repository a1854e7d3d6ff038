// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A link over a socket. Any thread sends, writing to the socket itself while nothing is queued; the
// reactor's thread reads, writes what is queued, and runs the callbacks.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/process_guard.h"
#include "base/wait.h"
#include "transport/channel.h"
#include "transport/door.h"
#include "transport/incoming.h"
#include "transport/tcp/reactor.h"
#include "transport/tcp/socket.h"
#include "transport/unsent.h"
#include "wire/handshake/handshake.h"

namespace cpudist::transport::tcp {

// Memory of received payloads that a listener or connector keeps for the next ones.
inline constexpr size_t kPoolBytes = 256u << 20;

struct ConnectionOptions {
  ConnectionHandler* handler = nullptr;
  ChannelLimits limits;
  std::shared_ptr<BufferPool> pool;
  std::string peer_address;
  bool unix_socket = false;    // no payload checksums
  bool listener_side = false;  // on_open, handshake deadline, the first frame must be a hello
  // Of a listener: what both ends prove before the first frame, by whose rules others come.
  std::shared_ptr<const wire::Credentials> credentials;
  std::string own_address;             // of a listener, as it tells others
  std::shared_ptr<Door> door;          // never null there
  std::shared_ptr<Incoming> incoming;  // nor this; of a connector there is none
  std::shared_ptr<FlowBudget> budget;  // nor this
  std::optional<wire::Identity> peer;  // of a connector: who has proven to be there
};

class TcpConnection final : public Connection,
                            public Reactor::Source,
                            public std::enable_shared_from_this<TcpConnection> {
 public:
  TcpConnection(Descriptor fd, std::shared_ptr<Reactor> reactor, ConnectionOptions options);

  bool send(wire::Frame frame) override;
  void close(const std::string& reason) override;
  bool closed() const override { return closing_.load(std::memory_order_acquire); }
  std::string peer_address() const override { return options_.peer_address; }
  Descriptor peer_process() override;
  bool reliable() const override { return true; }
  uint64_t bytes_sent() const override { return bytes_sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_received() const override {
    return bytes_received_.load(std::memory_order_relaxed);
  }

  uint64_t bytes_moved() const override {
    return bytes_received() + bytes_drained_.load(std::memory_order_relaxed);
  }

  // Before start(): the place that it has until its first frame is taken.
  void take_place(std::unique_ptr<Door::Guest> place);
  // On the reactor's thread, once: from here on frames arrive.
  void start();
  void on_ready(uint32_t events) override;
  bool on_stop() override;

 private:
  struct Outbound {
    std::array<uint8_t, wire::kHeaderBytes> header;
    Buffer payload;
    size_t written = 0;  // of header and payload together
    size_t size() const { return wire::kHeaderBytes + payload.size(); }
  };
  enum class Written { kAll, kSome, kBroken };

  // Sending; the caller holds mutex_.
  bool make_room(std::unique_lock<std::mutex>& lock, size_t size_bytes);
  bool has_room(size_t size_bytes) const;
  Written write_queue();
  void drop_written(size_t size_bytes);
  void note_unsent();
  void arm(bool writable);
  uint32_t interest() const;                     // what the reactor is to tell of
  bool mark_closing(const std::string& reason);  // false if it was closing already

  // Receiving; the reactor's thread.
  bool receive();  // false when there is nothing more for now
  bool read_some();
  void parse(const uint8_t* data, size_t size_bytes);
  void begin_frame();
  void take_payload(const uint8_t* data, size_t size_bytes);  // already in place
  void finish_frame();
  void open();  // the handler hears of it
  void check_first(const wire::FrameHeader& header);
  void check_sender(const wire::FrameHeader& header) const;
  void authenticate(const wire::Frame& frame);
  void give_up_place();
  // A frame that is not complete, of a listener's: it has to get on, and may have to wait.
  void note_unfinished();
  bool has_unread() const;
  void watch_unfinished();
  void watch_unsent();
  bool must_wait();
  bool must_wait_for_takers();
  void pause_reading();
  bool speaks() const;
  void end_of_stream();
  size_t payload_missing() const { return payload_size_ - payload_have_; }
  bool dropping() const { return payload_.size() != payload_size_; }

  void flush();
  // The peer takes no more bytes; what it said before, such as why it ends, is still read.
  void hear_out(const std::string& reason);
  void fail(const std::string& reason);
  void finish();

  const std::shared_ptr<Reactor> reactor_;
  const ConnectionOptions options_;
  const ProcessGuard guard_;
  std::atomic<bool> closing_{false};
  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> bytes_received_{0};
  std::atomic<uint64_t> bytes_drained_{0};  // written once the socket had room again

  std::mutex mutex_;  // the socket's life and everything outbound
  ConditionVariable room_;
  Descriptor fd_;
  uint64_t token_ = 0;  // 0 = not watched
  bool armed_ = false;
  bool reading_ = true;
  std::string reason_;
  std::deque<Outbound> queue_;
  size_t queued_bytes_ = 0;
  uint64_t taken_bytes_ = 0;  // of all that was ever queued
  std::optional<Unsent> unsent_;
  bool unsent_watched_ = false;
  std::optional<TimePoint> full_since_;

  // The reactor's thread only.
  bool finished_ = false;
  bool peer_ended_ = false;
  bool accepted_ = false;  // the handler took the first frame
  bool opened_ = false;    // the handler knows of it
  bool turned_away_ = false;
  bool went_ = false;  // of its own accord, without anything that is not a handshake's
  bool stopping_ = false;
  std::optional<wire::ListeningHandshake> handshake_;  // until it is done
  std::optional<wire::Identity> peer_;                 // whose frames may come; any without
  std::unique_ptr<Door::Guest> place_;
  size_t header_have_ = 0;
  std::array<uint8_t, wire::kHeaderBytes> header_bytes_;
  wire::FrameHeader header_;
  std::vector<uint8_t> kept_;  // has come, and is not looked at yet
  Buffer payload_;
  size_t payload_size_ = 0;  // of the frame that is being read
  size_t payload_have_ = 0;
  uint32_t payload_crc_ = 0;
  std::unique_ptr<Incoming::Frame> coming_;
  bool watched_ = false;  // a timer looks after it
  bool hung_up_ = false;  // the peer: what is there is read without a wait
};

}  // namespace cpudist::transport::tcp
