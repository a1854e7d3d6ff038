// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The links of one trainer with all others, which are its equals. Each trainer
// sends a stream of numbered frames to each other over the connection that it
// makes itself; frames are kept until they are acknowledged, and sent again
// from the first unacknowledged one after a reconnect, or by timer on
// connections that lose frames. A receiver takes the next of a stream and drops
// the rest, so each frame is taken once. A thread connects, says hello, beats,
// notices silence and replaces broken connections.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/errors.h"
#include "base/wait.h"
#include "transport/channel.h"
#include "wire/frame.h"

namespace cpudist::transport {

struct PeerLinksOptions {
  uint32_t rank = 0;
  uint32_t peers = 1;  // with this one
  uint64_t connect_deadline_ms = 30000;
  uint64_t liveness_ms = 5000;
  uint64_t resend_ms = 200;  // on connections that lose frames
  wire::FrameHeader header;  // of all frames, but for kind and sequence
  wire::FrameKind acknowledgement = wire::FrameKind::kError;
  std::string name;    // of what goes over them, begins messages
  std::string misfit;  // what a peer has sent whose frame was refused, for messages
};

// A link as its user sees it.
struct LinkState {
  bool ever_open = false;
  bool broken = true;        // there is no connection to the peer
  bool unreachable = false;  // the last attempt to connect failed
  size_t pending = 0;        // frames that are not acknowledged
  uint64_t acknowledged = 0;
};

// What the frames are. Called from the channel's threads and that of the links.
class PeerLinksUser {
 public:
  struct Greeting {
    uint32_t rank = 0;   // of its sender
    uint64_t taken = 0;  // the last frame of this trainer that it has taken
    std::string host;
  };

  virtual ~PeerLinksUser() = default;
  virtual wire::Frame hello(uint32_t to, uint64_t taken) const = 0;
  // A hello that came, and the answer to one. Throw Error, of which the peer is
  // told.
  virtual Greeting greeted(const wire::Frame& hello) const = 0;
  virtual Greeting answered(const wire::Frame& hello) const = 0;
  virtual wire::Frame refusal(const Error& error) const = 0;
  virtual Error refused(const wire::Frame& refusal) const = 0;
  // Frames of a peer's stream, in order and each once; of one peer one at a
  // time. What it throws ends all links.
  virtual void take(uint32_t rank, const wire::Frame& frame) = 0;
  // Nothing is due to the peer nor to this trainer: the link is not looked
  // after any more. Called with a lock of the links: takes none.
  virtual bool settled(uint32_t rank, const LinkState& link) const = 0;
};

class PeerLinks final : public ConnectionHandler {
 public:
  PeerLinks(PeerLinksOptions options, PeerLinksUser* user);
  ~PeerLinks() override { close(false); }
  PeerLinks(const PeerLinks&) = delete;
  PeerLinks& operator=(const PeerLinks&) = delete;

  // `addresses` by rank, best first; the own ones are not used. Starts the
  // thread.
  void connect(std::vector<std::vector<std::string>> addresses, std::unique_ptr<Listener> listener,
               std::shared_ptr<Connector> connector);
  // Returns the number of the frame. Does not wait: what is not sent now is
  // sent when the link is open again. One thread at a time per peer.
  uint64_t push(uint32_t to, wire::FrameKind kind, Buffer payload);

  // Waits until the condition holds, or for so long; returns whether it does. Throws what ended the
  // links, and kClosed. The condition is asked with the lock that state() and describe() need.
  template <typename Condition>
  bool wait(std::chrono::milliseconds most, const Condition& condition) {
    Lock lock(mutex_);
    const auto holds = [&] {
      if (failure_) throw Error(*failure_);
      if (closed_) throw Error(ErrorCode::kClosed, options_.name + ": it was closed");
      return condition();
    };
    return changed_.wait_for(lock, most, holds);
  }
  // In a condition of wait() only.
  LinkState state(uint32_t rank) const;
  bool settled(uint32_t rank) const { return user_->settled(rank, state(rank)); }
  // With host and address, as far as they are known.
  std::string describe(uint32_t rank) const;

  // Ends connections and threads. Peers are told, unless nobody needs this one any more.
  // Idempotent.
  void close(bool needed);

  void on_frame(const std::shared_ptr<Connection>& connection, wire::Frame frame) override;
  void on_close(const std::shared_ptr<Connection>& connection, const std::string& reason) override;

 private:
  using ConnectionPtr = std::shared_ptr<Connection>;
  using Lock = std::unique_lock<std::mutex>;
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
    bool resend = false;  // on a new connection
    bool unreachable = false;
    std::string trouble;
    TimePoint give_up;
    TimePoint try_next;
    uint64_t attempts = 0;
    TimePoint sent;  // the last hello, or frame of the stream
    uint64_t seen_bytes = 0;
    std::deque<Pending> pending;
    uint64_t last_sequence = 0;
    uint64_t acknowledged = 0;
  };
  struct Peer {
    Outgoing out;
    ConnectionPtr incoming;
    uint64_t seen_bytes = 0;  // of `incoming`
    TimePoint heard;
    std::string host;
    // Frames of a stream leave in sequence, and are taken in sequence. Held
    // while they are; taken before the mutex of the links.
    std::mutex sending;
    std::mutex taking;
    uint64_t taken = 0;  // last sequence; under `taking`
  };

  wire::Frame frame_of(wire::FrameKind kind, uint64_t sequence = 0, Buffer payload = {}) const;
  void on_reply(uint32_t rank, const wire::Frame& frame);
  void greet(const ConnectionPtr& connection, const wire::Frame& frame);
  void take(uint32_t rank, const ConnectionPtr& connection, const wire::Frame& frame);
  std::optional<uint32_t> outgoing_rank(const Connection* connection) const;

  void keep();
  void look_after(uint32_t rank, Lock& lock, bool beat);
  bool reach_some(Lock& lock);
  void reach(uint32_t rank, Lock& lock);
  std::chrono::milliseconds pause_of(uint32_t rank);
  void send_pending(uint32_t rank, Lock& lock);

  // With the lock:
  void acknowledge(Outgoing& out, uint64_t sequence);
  void fail(const Error& error);

  const PeerLinksOptions options_;
  PeerLinksUser* const user_;
  std::unique_ptr<Listener> listener_;
  std::shared_ptr<Connector> connector_;
  std::thread thread_;
  uint32_t next_reached_ = 0;  // of that thread

  mutable std::mutex mutex_;
  ConditionVariable changed_;  // for the user
  ConditionVariable work_;     // for the thread
  std::deque<Peer> peers_;     // by rank; the one of this trainer is unused
  std::unordered_map<const Connection*, uint32_t> incoming_;  // after the hello
  std::optional<Error> failure_;
  bool closed_ = false;
};

}  // namespace cpudist::transport
