// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A channel carries whole frames between a client and a server. Two implementations: tcp_channel
// (epoll over TCP or a unix socket) and inproc_channel (same process; can drop, delay, duplicate,
// reorder and cut). Clients and servers see only this file.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/descriptor.h"
#include "wire/frame.h"

namespace cpudist::transport {

// One end of an established link. Shared: held by its channel and by whoever talks over it.
class Connection {
 public:
  virtual ~Connection() = default;
  // Any thread. Takes the frame, fills length and checksums, never throws for a dead link: returns
  // false when the link is closed. Returns at once if the frame can be queued; a queue above
  // ChannelLimits::outbound_cap_bytes makes the caller wait at most `outbound_deadline_ms`, then
  // the link is closed as frozen.
  virtual bool send(wire::Frame frame) = 0;
  // Any thread, idempotent; closed() holds at once and on_close of both ends follows. What was
  // queued is written as far as the socket takes it. In-process on_close runs inside this call, so
  // call it without locks that your on_close takes.
  virtual void close(const std::string& reason) = 0;
  virtual bool closed() const = 0;
  virtual std::string peer_address() const = 0;
  // A pidfd of the process at the other end, for has_ended(); nothing where the kernel does not
  // tell (TCP, another namespace of process ids) or the link is closed.
  virtual Descriptor peer_process() { return Descriptor(); }
  // False when frames may vanish, come twice or overtake each other (in-process faults): senders
  // then keep every request, and resend idempotent ones by timer.
  virtual bool reliable() const = 0;
  virtual uint64_t bytes_sent() const = 0;
  virtual uint64_t bytes_received() const = 0;
  // Grows as long as the peer gives bytes, or takes them out of a queue that has built up: a sign
  // of life within a frame that takes long. A write that the kernel accepts at once is none.
  virtual uint64_t bytes_moved() const = 0;
};

// Called from the channel's threads (or, in-process without faults, from the sender's thread inside
// send(): so a handler must not be called with locks held that its own callbacks take). A callback
// must not block for long and must not throw, except Error from on_frame, which closes that
// connection only. Frames of one connection arrive one at a time over sockets; in-process,
// frames that several threads send at once arrive at once.
class ConnectionHandler {
 public:
  virtual ~ConnectionHandler() = default;
  // Listener side only, before the first on_frame.
  virtual void on_open(const std::shared_ptr<Connection>& connection) { (void)connection; }
  // Sockets: memory for the payload that `header` announces. Of another size: there is none to
  // spare; the payload is read and thrown away, and the frame delivered without it.
  virtual Buffer payload_memory(const wire::FrameHeader& header,
                                const std::shared_ptr<BufferPool>& pool) {
    return Buffer(static_cast<size_t>(header.length), pool);
  }
  virtual void on_frame(const std::shared_ptr<Connection>& connection, wire::Frame frame) = 0;
  // Exactly once per connection, after the last on_frame.
  virtual void on_close(const std::shared_ptr<Connection>& connection,
                        const std::string& reason) = 0;
};

struct ChannelLimits {
  uint64_t payload_limit_bytes = wire::kPayloadLimitBytes;  // one frame
  uint64_t pre_hello_limit_bytes = 4096;     // payload before the first accepted frame
  uint64_t outbound_cap_bytes = 1ull << 30;  // queued on one connection
  uint64_t outbound_deadline_ms = 30000;
  // Server side: the first frame must be complete by then. Client side: the longest wait for a
  // server that is asked to prove its key.
  uint64_t handshake_deadline_ms = 2000;
  uint64_t socket_buffer_bytes = 4ull << 20;
};

// Server side. Stops and joins its threads on destruction; after stop() no callback runs. stop()
// closes every connection; it must not be called from a callback.
class Listener {
 public:
  virtual ~Listener() = default;
  // Addresses for clients, best first, e.g. "unix:@cpudist-...", "tcp:127.0.0.1:40123".
  virtual std::vector<std::string> addresses() const = 0;
  virtual void stop() = 0;
};

// Client side. `connect` blocks until established (with a key: proven), or until the deadline;
// throws Error(kAddress), kPeerLost where no further attempt can succeed, or kAuthentication where
// whoever is there does not prove the key.
class Connector {
 public:
  virtual ~Connector() = default;
  virtual std::shared_ptr<Connection> connect(const std::string& address, TimePoint deadline) = 0;
  // Attempts that are under way, and later ones, fail soon. Connections go on.
  virtual void stop_attempts() {}
  virtual void stop() = 0;  // joins threads; after it no callback runs
};

}  // namespace cpudist::transport
