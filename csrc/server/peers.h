// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a server knows of its trainers: connections, incarnations, who has said goodbye and who is
// lost. What they have asked for is the sequencer's, which is told whose requests to take.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/errors.h"
#include "base/wait.h"
#include "server/counters.h"
#include "server/options.h"
#include "server/outbox.h"
#include "server/sequencer.h"
#include "transport/channel.h"
#include "wire/messages.h"

namespace cpudist::server {

// Thread safety: all members; none sends a frame or calls out while its lock is held.
class Peers {
 public:
  Peers(const ServerOptions& options, ServerCounters& counters, Sequencer& sequencer);

  // ---- connections ----
  void opened(const std::shared_ptr<transport::Connection>& connection);
  void closed(const std::shared_ptr<transport::Connection>& connection);
  // A newer incarnation that has taken over from an older one, whose parked requests must go.
  struct Takeover {
    uint32_t rank = 0;
    std::shared_ptr<Buffer> hello;  // that is queued for it, and not sent yet
  };
  // Accepts or refuses a hello; queues the reply and the close of a replaced connection.
  std::optional<Takeover> greet(const std::shared_ptr<transport::Connection>& connection,
                                const wire::FrameHeader& header, const wire::Hello& hello,
                                Outbox& outbox);
  // What was parked has gone: tells who took over what of the older one was carried out. Nothing
  // fails here, as nothing of a takeover may once it has begun.
  void welcome(const Takeover& takeover) const noexcept;
  // The trainer behind a frame; counts as a sign of life. Throws kProtocol for a frame before the
  // hello or one that contradicts it.
  uint32_t identify(const std::shared_ptr<transport::Connection>& connection,
                    const wire::FrameHeader& header);

  // ---- goodbye and loss ----
  void say_goodbye(uint32_t rank);      // not waited for from now on
  void confirm_goodbye(uint32_t rank);  // its answer is sent: counts for wait_done
  // Ranks that have not said goodbye, in order; elastic: nor are lost.
  std::vector<uint32_t> active() const;
  // Ranks that a parameter set is kept for: elastic: a lost trainer may come back for a while.
  std::vector<uint32_t> remaining() const;
  // Ranks that have come and have not said goodbye; elastic: nor were given up.
  void list_awaited(std::vector<uint32_t>* present, std::vector<uint32_t>* lost) const;
  bool is_lost(uint32_t rank) const;
  // The error for a request that waits for one of `ranks`, if one of them is lost.
  std::optional<Error> find_lost(const std::vector<uint32_t>& ranks) const;
  std::optional<Error> find_lost() const;
  bool wait_done(TimePoint deadline);

  // ---- liveness thread ----
  // Sleeps until a trainer is overdue, marks it lost and returns its error with the connection to
  // close; nothing once stopped, or when it is time for what wake_by() was called for.
  struct Loss {
    uint32_t rank = 0;
    Error error;      // for those who wait for it
    Error to_itself;  // it may be there, and not have noticed
    std::shared_ptr<transport::Connection> connection;
  };
  std::optional<Loss> wait_for_loss();
  void wake_by(TimePoint when);  // for something else to be looked at
  // Sleeps until it is time to look again, or until it is stopped.
  void wait_for_look();
  // A trainer tells why it is about to close its connection without goodbye: usually a loss that
  // others may notice later than the end of this one.
  void note_end(uint32_t rank, const std::string& reason);
  // Tells every trainer that has not said goodbye, whether it waits for something here or not.
  void stop(const std::string& reason, Outbox& outbox);
  bool stopped() const;
  // What a trainer that has not said goodbye is told: to it, a stopped server is a lost one.
  // Any thread once stopped.
  Error stopped_error() const;

  void add_traffic(ServerStats* stats) const;

 private:
  struct Peer {
    bool seen = false;
    bool goodbye = false;
    bool gone = false;  // goodbye answered
    uint32_t incarnation = 0;
    std::string host;
    std::string address;
    std::shared_ptr<transport::Connection> connection;
    Descriptor process;  // at the end of its last connection, if that is known
    TimePoint heard;     // last frame, or bytes of one
    uint64_t bytes_seen = 0;
    TimePoint broken;   // when the connection went
    std::string ended;  // why this connection's end gives up, in its own words
    std::string lost;   // message, empty while alive
    TimePoint lost_at;
  };
  struct Session {
    std::shared_ptr<transport::Connection> connection;
    std::optional<uint32_t> rank;
    uint32_t incarnation = 0;
    bool fenced = false;
  };

  std::optional<Error> refusal(const wire::FrameHeader& header, const wire::Hello& hello) const;
  // Of one that no start of this trainer can have, or that another process of it has.
  std::optional<Error> incarnation_refusal(const wire::FrameHeader& header,
                                           const wire::Hello& hello) const;
  // Of one more that nobody has told this server to expect, where there are so many.
  std::optional<Error> crowd_refusal(uint32_t rank) const;
  // Whichever frame of it is answered: one that was read before its connection was closed, or a
  // hello after that.
  Error told_itself(const std::string& lost) const;
  Buffer make_hello(uint32_t rank, uint64_t last_sequence) const;  // the server's answer
  // What the old connection of `peer` is told when there is a new one.
  void replace_connection(const Peer& peer, const wire::FrameHeader& header, Outbox& outbox) const;
  bool expected(uint32_t rank) const;
  TimePoint given_up_at(const Peer& peer) const;  // a lost one
  std::string describe(uint32_t rank) const;
  void note_signs_of_life(TimePoint now, bool was_away, Clock::duration missed);
  // When `rank` will be overdue, or nothing; with `why` the reason in words.
  std::optional<TimePoint> overdue_at(const Peer& peer, std::string* why) const;

  const ServerOptions& options_;
  ServerCounters& counters_;
  Sequencer& sequencer_;  // its lock is taken with this one held
  const TimePoint started_;
  const uint64_t more_trainers_;
  mutable std::mutex mutex_;
  ConditionVariable changed_;
  std::vector<Peer> peers_;
  size_t met_ = 0;  // trainers, ever
  std::unordered_map<const transport::Connection*, Session> sessions_;
  uint64_t closed_bytes_sent_ = 0;
  uint64_t closed_bytes_received_ = 0;
  std::optional<TimePoint> wake_at_;
  bool stopped_ = false;
  std::string stop_reason_;  // written once, before stopped_
};

}  // namespace cpudist::server
