// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The state of a shuffle. One stream of sequenced frames to each trainer: records, an end with
// their totals, and "done" once that is acknowledged. Frames are kept until they are, and sent
// again from the first unacknowledged one after a reconnect, or by timer on links that lose
// frames; a receiver takes the next in sequence and drops the rest.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "base/errors.h"
#include "base/wait.h"
#include "data/shuffle/exchange.h"
#include "wire/control.h"
#include "wire/frame.h"

namespace cpudist::data {

inline constexpr size_t kShuffleFrameBytes = 1 << 20;
inline constexpr size_t kShuffleWindow = 4;  // unacknowledged frames per destination

using ConnectionPtr = std::shared_ptr<transport::Connection>;

struct ShuffleExchange::Impl : transport::ConnectionHandler {
  struct Pending {
    wire::FrameKind kind;
    uint64_t sequence;
    Buffer payload;
  };
  // This trainer's stream to a peer, over the connection that it makes itself.
  struct Outgoing {
    std::vector<std::string> addresses;
    ConnectionPtr connection;
    bool open = false;  // the hello was answered
    bool ever_open = false;
    bool resend = false;       // on a new connection
    bool unreachable = false;  // the last attempt to connect failed
    std::string trouble;
    TimePoint give_up;
    TimePoint try_next;
    TimePoint sent;  // the last hello, or frame of the stream
    uint64_t bytes_seen = 0;
    std::deque<Pending> pending;
    uint64_t last_sequence = 0;
    uint64_t end_sequence = 0;  // 0: no end yet
    uint64_t done_sequence = 0;
    uint64_t acknowledged = 0;
  };
  struct Incoming {
    ConnectionPtr connection;
    uint64_t bytes_seen = 0;
    bool ended = false;
    bool done = false;
  };
  struct Peer {
    Outgoing out;
    Incoming in;
    TimePoint heard;
    std::string host;
    // Frames of the stream leave in sequence. Held while they are sent; taken before `mutex`.
    std::mutex sending;
    // Frames of the peer's stream are taken in sequence. Held while the sink takes records.
    std::mutex taking;
    uint64_t taken = 0;      // last sequence; under `taking`
    ShuffleTotals received;  // under `taking`
    // Of the thread that sends:
    Buffer filling;
    size_t filled_bytes = 0;
    ShuffleTotals sent;
  };

  Impl(Schema schema, ShuffleOptions options, ShuffleSink sink);
  ~Impl() override { close(); }

  // ---- shuffle_exchange.cpp: the thread that shuffles ----
  void connect(std::vector<std::vector<std::string>> addresses);
  void send(uint32_t to, std::span<const uint64_t> records);
  void append(Peer& peer, const uint64_t* record, size_t size_bytes);
  void flush(Peer& peer);
  void push(Peer& peer, wire::FrameKind kind, Buffer payload);
  ShuffleTotals finish();
  void close();
  template <typename Condition>
  void wait(std::unique_lock<std::mutex>& lock, const char* what, const Condition& condition);
  std::string waited_for() const;

  // ---- shuffle_frames.cpp: what arrives ----
  void on_frame(const ConnectionPtr& connection, wire::Frame frame) override;
  void on_close(const ConnectionPtr& connection, const std::string& reason) override;
  void on_reply(uint32_t rank, const wire::Frame& frame);
  void greet(const ConnectionPtr& connection, const wire::Frame& frame);
  void take(uint32_t rank, const ConnectionPtr& connection, const wire::Frame& frame);
  void take_next(uint32_t rank, const wire::Frame& frame);
  void take_records(uint32_t rank, const wire::Frame& frame);
  void take_end(uint32_t rank, const wire::Frame& frame);
  void acknowledge(Outgoing& out, uint64_t sequence);  // under `mutex`
  void refuse(const ConnectionPtr& connection, const Error& error);
  std::optional<uint32_t> outgoing_rank(const transport::Connection* connection) const;

  // ---- shuffle_links.cpp: the thread that keeps the links ----
  void monitor();
  void look_after(uint32_t rank, std::unique_lock<std::mutex>& lock, bool beat);
  void reach(uint32_t rank, std::unique_lock<std::mutex>& lock);
  void send_pending(uint32_t rank, std::unique_lock<std::mutex>& lock);
  void note_life(Peer& peer, TimePoint now);
  bool settled(const Peer& peer) const;
  void fail(const Error& error);  // under `mutex`; the first one counts
  std::string describe(uint32_t rank) const;

  wire::FrameHeader header(wire::FrameKind kind, uint64_t sequence = 0) const;
  wire::Frame hello(uint32_t to, uint64_t last_sequence) const;
  bool is_peer(uint32_t rank) const { return rank != options.rank; }

  const Schema schema;
  const ShuffleOptions options;
  const ShuffleSink sink;
  ShuffleTotals kept;  // what this trainer gave itself

  std::unique_ptr<transport::Listener> listener;
  std::shared_ptr<transport::Connector> connector;
  std::thread monitor_thread;

  mutable std::mutex mutex;
  ConditionVariable changed;  // for the thread that shuffles
  ConditionVariable work;     // for the thread that keeps the links
  std::deque<Peer> peers;     // by rank; the one of this trainer is unused
  std::unordered_map<const transport::Connection*, uint32_t> sessions;  // incoming, after the hello
  std::optional<Error> failure;
  bool finished = false;
  bool stopping = false;
  bool closed = false;
};

}  // namespace cpudist::data
