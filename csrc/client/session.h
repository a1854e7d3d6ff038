// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The client's side of the protocol, without knowing what the messages mean: one link per server,
// requests matched to replies, resending, probing, reconnecting, liveness, deadlines.
//
// Locks: one mutex guards links and requests; it is never held while a frame is sent, a connection
// is closed or a callback of the user runs, because in-process replies arrive inside send().
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/process_end.h"
#include "base/wait.h"
#include "client/links/link.h"
#include "client/links/seekers.h"
#include "client/options.h"
#include "client/stats.h"
#include "transport/liveness.h"

namespace cpudist::client {

class Session final : public transport::ConnectionHandler {
 public:
  // Who waits: a thread of the user's is interrupted by signals, and its waiting is counted.
  enum class Caller { kUser, kBackground };

  Session(ClientOptions options, const ConnectorFactory& make_connector);
  ~Session() override;

  void connect();
  uint32_t server_count() const { return static_cast<uint32_t>(links_.size()); }
  const ClientOptions& options() const { return options_; }
  // The order in which to ask all servers: remote ones first, as a server of this process works in
  // the thread that sends to it; the trainers begin at different servers.
  const std::vector<uint32_t>& send_order() const { return send_order_; }
  bool in_process(uint32_t server) const;
  // Whether frames to this server are worth making short: over TCP, a collective backend, or an
  // in-process network that stands for one by its faults.
  bool over_network(uint32_t server) const;

  // Sends a request, or keeps it until the link is back. Throws the session's failure. Sequenced
  // requests: one thread at a time, and none in flight to that server.
  RequestPtr send(uint32_t server, wire::FrameKind kind, uint32_t param_set, Buffer payload,
                  bool coded = false);
  // Until all are answered, or the first error. Throws the first error of a reply, kPeerLost,
  // kTimeout, kInterrupted, kClosed.
  void wait(std::span<const RequestPtr> requests, Caller caller = Caller::kUser);
  // Until no sequenced request is in flight, whatever the answers; throws like wait, and kTimeout
  // after `limit_ms`.
  void drain(uint64_t limit_ms, Caller caller = Caller::kUser);

  // All have come, none with an error.
  bool answered(std::span<const RequestPtr> requests) const;
  // Nobody will wait for the answers of these idempotent requests.
  void give_up(std::span<const RequestPtr> requests);
  bool refused(std::span<const RequestPtr> requests) const;  // one was answered with an error

  // The incarnation that a server has in the place of this one, as it has answered a hello; 0:
  // none.
  uint32_t fenced_by() const {
    const std::lock_guard lock(mutex_);
    return fenced_by_;
  }
  void check() const {  // throws what it has failed with
    const std::lock_guard lock(mutex_);
    throw_failure();
  }
  // Whether a server has said that it has counted this trainer as lost: it goes on, and takes this
  // trainer as a newer incarnation.
  bool counted_lost() const {
    const std::lock_guard lock(mutex_);
    return counted_lost_;
  }
  // Whether it has failed because nothing came from a server, or no other link could be made in the
  // place of one that broke: it may still run. False where a server has said that it ends.
  bool out_of_reach() const {
    const std::lock_guard lock(mutex_);
    return out_of_reach_;
  }
  // Whether the process of a server on this host has ended by now, whatever it said before.
  bool server_ended() const {
    const std::lock_guard lock(mutex_);
    return std::any_of(links_.begin(), links_.end(),
                       [](const Link& link) { return has_ended(link.process); });
  }
  // Per server, see wire::Hello; as of its first one.
  std::vector<uint64_t> carried_out_before() const {
    const std::lock_guard lock(mutex_);
    return carried_out_before_;
  }
  void abort(const std::string& reason);
  void disconnect();  // closes the links; later calls throw kClosed
  void add_stats(ClientStats* stats) const;

  void on_frame(const std::shared_ptr<transport::Connection>& connection,
                wire::Frame frame) override;
  void on_close(const std::shared_ptr<transport::Connection>& connection,
                const std::string& reason) override;

 private:
  struct Outgoing {
    std::shared_ptr<transport::Connection> connection;
    wire::Frame frame;
  };
  struct Waiter {  // clocks of one wait
    Caller caller = Caller::kUser;
    TimePoint started;
    TimePoint poll_next;
    TimePoint log_next;
    uint64_t stored_bytes = 0;  // by trainer 0, when it was logged last
  };

  wire::FrameHeader make_header(wire::FrameKind kind) const;
  wire::Frame make_hello(const Link& link) const;
  Link* find_link(const transport::Connection* connection);
  std::string describe(const Link& link) const;

  // ---- replies, under the lock ----
  void accept_hello(Link& link, const wire::Frame& frame);
  // `second`: over a second connection.
  void accept_error(Link& link, const wire::Frame& frame, bool second);
  void accept_reply(Link& link, wire::Frame frame);
  void accept_probe_reply(const wire::Frame& frame);
  void finish(Request& request);
  // The spare connection takes the place of the silent one, which is to be closed.
  std::shared_ptr<transport::Connection> take_spare(Link& link);
  void fail(const Error& error);
  void throw_failure() const;

  // ---- waiting ----
  bool settled(std::span<const RequestPtr> requests) const;
  // Counts the connections that a request went out on; one too many loses the server.
  bool may_send_again(Request& request, Link& link);
  void check_deadlines(std::span<const RequestPtr> requests, const Waiter& waiter,
                       TimePoint now) const;
  std::vector<Outgoing> due_frames(std::span<const RequestPtr> requests, TimePoint now);
  std::string straggler_text(std::span<const RequestPtr> requests, const Waiter& waiter,
                             TimePoint now) const;
  // What servers have been sent to store, of the requests that wait for it.
  static uint64_t stored_meanwhile(std::span<const RequestPtr> requests);
  void serve_wait(std::span<const RequestPtr> requests, Waiter& waiter,
                  std::unique_lock<std::mutex>& lock);
  void wait_settled(std::span<const RequestPtr> requests, TimePoint limit, Caller caller);

  // ---- monitor thread ----
  void monitor();
  void look_after_links(std::unique_lock<std::mutex>& lock, transport::Attendance& attendance);
  void beat(std::unique_lock<std::mutex>& lock, TimePoint now, bool was_away);
  void revive(Link& link, std::unique_lock<std::mutex>& lock);
  void lose(Link& link, const std::string& why);
  void lose_place(Link& link, const std::string& what);  // to a server of another run or layout
  std::chrono::milliseconds pause_of(Link& link) const;  // before another attempt
  void repeat_hello(Link& link, std::unique_lock<std::mutex>& lock, TimePoint now);
  TimePoint next_wakeup(TimePoint now) const;
  void close_links(const std::string& reason);

  const ClientOptions options_;
  std::shared_ptr<transport::Connector> connector_;
  mutable std::mutex mutex_;
  ConditionVariable answered_;  // waiting threads
  ConditionVariable changed_;   // the monitor
  std::vector<Link> links_;
  std::vector<uint32_t> send_order_;
  std::map<uint64_t, RequestPtr> requests_;  // by request id, unanswered
  uint64_t next_request_id_ = 1;
  std::optional<Error> failure_;
  uint32_t fenced_by_ = 0;
  bool out_of_reach_ = false;
  bool counted_lost_ = false;
  std::vector<uint64_t> carried_out_before_;
  bool started_ = false;
  bool stopping_ = false;
  TimePoint beat_next_;
  ClientStats stats_;
  std::thread monitor_;
  Seekers seekers_;
};

}  // namespace cpudist::client
