// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// long: one class, whose three parts share one mutex
// Requests and replies, how a thread waits for them, and the thread that keeps the links alive.
#include "client/session.h"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <set>
#include <utility>

#include "base/process_end.h"
#include "base/threads.h"
#include "base/words.h"
#include "transport/retry.h"

namespace cpudist::client {

namespace {

using std::chrono::milliseconds;

constexpr auto kPollInterval = milliseconds(50);
// Levels of ClientOptions::log.
constexpr int kWarning = 0;
constexpr int kInfo = 1;
// One attempt to reach a server that has not answered yet; others get their turn in between.
constexpr auto kFirstAttempt = milliseconds(2000);
constexpr auto kLookAgain = milliseconds(20);

bool is_inproc(const std::string& address) { return address.starts_with("inproc:"); }

}  // namespace

Session::Session(ClientOptions options, const ConnectorFactory& make_connector)
    : options_(std::move(options)),
      carried_out_before_(options_.servers.size()),
      seekers_({mutex_, changed_, options_.liveness_ms,
                [this] { return stopping_ || failure_.has_value(); },
                [this](const Link& link) { return make_hello(link); },
                [this](Link& link) { return pause_of(link); },
                [this](const std::string& address, TimePoint deadline) {
                  return connector_->connect(address, deadline);
                }},
               options_.servers.size()) {
  if (options_.servers.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "client: the list of servers is empty");
  }
  for (const auto& addresses : options_.servers) {
    Link link;
    link.server = static_cast<uint32_t>(links_.size());
    link.addresses = addresses;
    if (addresses.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "client: server " + std::to_string(link.server) + " has no address");
    }
    links_.push_back(std::move(link));
  }
  for (uint32_t i = 0; i < server_count(); ++i) {
    send_order_.push_back((options_.trainer_rank + 1 + i) % server_count());
  }
  std::stable_partition(send_order_.begin(), send_order_.end(), [&](uint32_t server) {
    return !is_inproc(links_[server].addresses.front());
  });
  connector_ = make_connector(this);
}

Session::~Session() { disconnect(); }

wire::FrameHeader Session::make_header(wire::FrameKind kind) const {
  wire::FrameHeader header;
  header.kind = kind;
  header.run_id = options_.run_id;
  header.incarnation = options_.incarnation;
  header.role = wire::Role::kTrainer;
  header.rank = static_cast<uint16_t>(options_.trainer_rank);
  header.param_set = wire::kNoParamSet;
  return header;
}

wire::Frame Session::make_hello(const Link& link) const {
  wire::Hello hello;
  hello.trainer_count = options_.trainer_count;
  hello.server_count = server_count();
  hello.shard_id = link.server;
  hello.host = options_.host;
  return wire::Frame{make_header(wire::FrameKind::kHello), encode(hello)};
}

std::string Session::describe(const Link& link) const {
  const std::string& address = link.address.empty() ? link.addresses.front() : link.address;
  const std::string host = link.host.empty() ? "" : ", " + link.host;
  return "server " + std::to_string(link.server) + " (" + address + host + ")";
}

Link* Session::find_link(const transport::Connection* connection) {
  const auto found = std::find_if(links_.begin(), links_.end(), [&](const Link& link) {
    return link.connection.get() == connection || link.spare.connection.get() == connection;
  });
  return found == links_.end() ? nullptr : &*found;
}

bool Session::in_process(uint32_t server) const {
  return is_inproc(links_.at(server).addresses.front());
}

bool Session::over_network(uint32_t server) const {
  // By the best address, not the one in use: the same in every call.
  const Link& link = links_.at(server);
  if (!in_process(server)) return !link.addresses.front().starts_with("unix:");
  const std::lock_guard lock(mutex_);
  return !link.connection || !link.connection->reliable();
}

void Session::throw_failure() const {
  if (failure_) throw Error(*failure_);
}

void Session::fail(const Error& error) {
  if (!failure_) failure_ = error;
  answered_.notify_all();
  changed_.notify_all();
}

RequestPtr Session::send(uint32_t server, wire::FrameKind kind, uint32_t param_set, Buffer payload,
                         bool coded) {
  auto request = std::make_shared<Request>();
  request->server = server;
  request->header = make_header(kind);
  request->header.param_set = param_set;
  request->header.coded = coded;
  std::shared_ptr<transport::Connection> connection;
  {
    const std::lock_guard lock(mutex_);
    throw_failure();
    if (!started_) throw Error(ErrorCode::kInvalidArgument, "client: connect() was not called");
    Link& link = links_.at(server);
    if (wire::traits_of(kind).sequenced) {
      if (link.in_flight) {
        throw Error(ErrorCode::kInternal,
                    std::string("client: two requests in flight to ") + describe(link));
      }
      request->header.sequence = link.next_sequence++;
      link.in_flight = request;
    }
    request->header.request_id = next_request_id_++;
    request->started = request->sent = request->heard = Clock::now();
    if (link.state == LinkState::kOpen) connection = link.connection;
    request->must_send = connection == nullptr;
    if (connection) request->sent_on = link.opened;
    // Only an in-process link without faults cannot lose a frame; everything else may need it
    // again.
    request->has_kept = !connection || !connection->reliable() || !is_inproc(link.address);
    if (request->has_kept) request->kept = connection ? payload.share() : std::move(payload);
    requests_.emplace(request->header.request_id, request);
    ++stats_.requests;
  }
  // A dead link reports itself through on_close; the request is then taken up after the reconnect.
  if (connection) connection->send(wire::Frame{request->header, std::move(payload)});
  return request;
}

void Session::finish(Request& request) {
  request.done = true;
  Link& link = links_.at(request.server);
  if (link.in_flight.get() == &request) link.in_flight.reset();
  requests_.erase(request.header.request_id);
  answered_.notify_all();
}

void Session::on_frame(const std::shared_ptr<transport::Connection>& connection,
                       wire::Frame frame) {
  bool acknowledge = false;
  std::shared_ptr<transport::Connection> silent;
  {
    const std::lock_guard lock(mutex_);
    Link* link = find_link(connection.get());
    if (link == nullptr || link->state == LinkState::kClosed) return;
    link->heard = Clock::now();
    switch (frame.header.kind) {
      case wire::FrameKind::kHello:
        if (link->spare.connection == connection) silent = take_spare(*link);
        accept_hello(*link, frame);
        break;
      case wire::FrameKind::kHeartbeat:
        acknowledge = true;
        break;
      case wire::FrameKind::kHeartbeatAck:
        break;
      case wire::FrameKind::kError:
        accept_error(*link, frame, link->spare.connection == connection);
        break;
      case wire::FrameKind::kReply:
        accept_reply(*link, std::move(frame));
        break;
      case wire::FrameKind::kProbeReply:
        accept_probe_reply(frame);
        break;
      default:
        throw Error(ErrorCode::kProtocol,
                    std::string("a server sent a frame of kind ") + name_of(frame.header.kind));
    }
  }
  if (silent) silent->close("silent, and replaced by a newer connection");
  if (acknowledge)
    connection->send(wire::Frame{make_header(wire::FrameKind::kHeartbeatAck), Buffer()});
}

std::shared_ptr<transport::Connection> Session::take_spare(Link& link) {
  auto silent = std::move(link.connection);
  if (silent) {
    link.closed_bytes_sent += silent->bytes_sent();
    link.closed_bytes_received += silent->bytes_received();
  }
  link.connection = std::move(link.spare.connection);
  link.spare.connection.reset();
  link.state = LinkState::kHandshake;
  link.bytes_seen = 0;
  link.hello_sent = link.spare.switched = Clock::now();
  link.give_up = link.hello_sent + milliseconds(options_.reconnect_grace_ms);
  // That they go out again is none of the times that a request may.
  for (const auto& [id, request] : requests_) {
    if (request->server == link.server && request->sent_on != 0) request->sent_on = link.opened + 1;
  }
  return silent;
}

void Session::accept_hello(Link& link, const wire::Frame& frame) {
  if (link.state != LinkState::kHandshake) return;  // a duplicate
  const wire::Hello hello = wire::decode_hello(frame.payload.bytes());
  const bool other = frame.header.run_id != options_.run_id || hello.shard_id != link.server ||
                     hello.server_count != server_count() ||
                     hello.trainer_count != options_.trainer_count;
  if (!other || !link.ever_open) link.host = hello.host;
  if (other) {
    const std::string found =
        shard_text(hello.shard_id, hello.server_count, hello.trainer_count, frame.header.run_id);
    const std::string expected =
        shard_text(link.server, server_count(), options_.trainer_count, options_.run_id);
    if (link.ever_open) return lose_place(link, "it is " + found + ", not " + expected);
    fail(Error(ErrorCode::kConfigMismatch,
               describe(link) + " is " + found + "; expected " + expected));
    return;
  }
  link.state = LinkState::kOpen;
  link.process = link.connection->peer_process();
  if (link.ever_open) ++stats_.reconnects;
  if (!link.ever_open) carried_out_before_[link.server] = hello.carried_out_before;
  link.ever_open = true;
  ++link.opened;
  for (const auto& [id, request] : requests_) {
    if (request->server != link.server) continue;
    if (request->header.sequence == 0) {
      request->must_send = true;
    } else {
      request->must_probe = true;
    }
  }
  answered_.notify_all();
  changed_.notify_all();
}

void Session::accept_error(Link& link, const wire::Frame& frame, bool second) {
  const wire::ErrorReply reply = wire::decode_error(frame.payload.bytes());
  const Error error(reply.code, reply.message);
  if (reply.code == ErrorCode::kFenced) fenced_by_ = static_cast<uint32_t>(frame.header.sequence);
  if (reply.code == ErrorCode::kCountedLost) counted_lost_ = true;
  const auto found = requests_.find(frame.header.request_id);
  if (found != requests_.end() && found->second->server == link.server) {
    const RequestPtr request = found->second;
    request->error = error;
    // Refused for lack of memory, not recorded: the server expects the same number again.
    if (reply.code == ErrorCode::kOverloaded && request->header.sequence != 0) {
      link.next_sequence = request->header.sequence;
    }
    finish(*request);
  } else if (link.state == LinkState::kHandshake || frame.header.request_id == 0) {
    // Of a link that was open once: a stranger has the server's port for now. Another attempt
    // follows.
    if (reply.code == ErrorCode::kAuthentication && link.ever_open) throw error;
    // The server that has taken this hello before takes it again.
    const bool greets = link.state == LinkState::kHandshake || second;
    const bool foreign =
        reply.code == ErrorCode::kProtocol || reply.code == ErrorCode::kConfigMismatch;
    if (greets && foreign && link.ever_open) return lose_place(link, reply.message);
    fail(Error(reply.code, describe(link) + ": " + reply.message));
  }
}

void Session::accept_reply(Link& link, wire::Frame frame) {
  const auto found = requests_.find(frame.header.request_id);
  if (found == requests_.end()) return;  // answered before, or given up
  const RequestPtr request = found->second;
  if (request->server != link.server || request->header.sequence != frame.header.sequence) {
    throw Error(ErrorCode::kProtocol, describe(link) + " answered request " +
                                          std::to_string(frame.header.request_id) +
                                          ", which was sent to server " +
                                          std::to_string(request->server) + " with another number");
  }
  request->reply = std::move(frame);
  finish(*request);
}

void Session::accept_probe_reply(const wire::Frame& frame) {
  const auto found = requests_.find(frame.header.request_id);
  if (found == requests_.end()) return;
  Request& request = *found->second;
  const wire::ProbeReply reply = wire::decode_probe_reply(frame.payload.bytes());
  request.heard = Clock::now();
  request.waiting_for = reply.waiting_for;
  request.stored_bytes = reply.stored_bytes;
  if (!reply.known) {
    request.must_send = true;
    answered_.notify_all();
  }
}

void Session::abort(const std::string& reason) {
  std::vector<std::shared_ptr<transport::Connection>> open;
  {
    const std::lock_guard lock(mutex_);
    fail(Error(ErrorCode::kClosed, reason));
    for (const Link& link : links_) {
      if (link.state == LinkState::kOpen) open.push_back(link.connection);
    }
  }
  for (const auto& connection : open) {
    connection->send(wire::Frame{make_header(wire::FrameKind::kError),
                                 encode(wire::ErrorReply{ErrorCode::kClosed, reason})});
  }
  close_links(reason);
}

void Session::disconnect() {
  {
    const std::lock_guard lock(mutex_);
    fail(Error(ErrorCode::kClosed, "the client is closed"));
    stopping_ = true;
  }
  close_links("the client is closed");
  if (connector_) connector_->stop_attempts();  // the thread may be at one
  if (monitor_.joinable()) join_thread(monitor_);
  seekers_.join();
  if (connector_) connector_->stop();
}

void Session::close_links(const std::string& reason) {
  std::vector<std::shared_ptr<transport::Connection>> connections;
  {
    const std::lock_guard lock(mutex_);
    for (Link& link : links_) {
      link.state = LinkState::kClosed;
      if (link.connection) connections.push_back(link.connection);
      if (link.spare.connection) connections.push_back(link.spare.connection);
    }
    // A late reply may not touch what its waiter has let go.
    requests_.clear();
  }
  for (const auto& connection : connections) connection->close(reason);
}

void Session::add_stats(ClientStats* stats) const {
  const std::lock_guard lock(mutex_);
  stats->requests += stats_.requests;
  stats->resent += stats_.resent;
  stats->reconnects += stats_.reconnects;
  stats->wait_s += stats_.wait_s;
  stats->round_wait_s += stats_.round_wait_s;
  for (const Link& link : links_) {
    stats->bytes_sent += link.closed_bytes_sent;
    stats->bytes_received += link.closed_bytes_received;
    if (!link.connection) continue;
    stats->bytes_sent += link.connection->bytes_sent();
    stats->bytes_received += link.connection->bytes_received();
  }
}

// ---- waiting ------------------------------------------------------------------------------------
// A thread that waits serves its own requests meanwhile (probes, repeats, deadlines, progress
// messages) and looks for an interrupt every 50 ms.

void Session::wait(std::span<const RequestPtr> requests, Caller caller) {
  // Told of its end when no lock is held any more.
  std::optional<WaitNotice> notice;
  if (caller == Caller::kUser) notice.emplace(options_);
  const TimePoint started = Clock::now();
  try {
    wait_settled(requests, TimePoint::max(), caller);
  } catch (const Error&) {
    const std::lock_guard lock(mutex_);
    for (const RequestPtr& request : requests) {
      if (!wire::traits_of(request->header.kind).stays) {
        requests_.erase(request->header.request_id);
      }
    }
    throw;
  }
  const std::lock_guard lock(mutex_);
  const double waited_s = caller == Caller::kUser ? seconds_between(started, Clock::now()) : 0.0;
  stats_.wait_s += waited_s;
  const bool round = std::any_of(requests.begin(), requests.end(), [](const RequestPtr& request) {
    return wire::traits_of(request->header.kind).waits;
  });
  if (round) stats_.round_wait_s += waited_s;
  for (const RequestPtr& request : requests) {
    if (request->error) throw Error(*request->error);
  }
}

void Session::drain(uint64_t limit_ms, Caller caller) {
  const TimePoint limit = Clock::now() + milliseconds(limit_ms);
  while (true) {
    std::vector<RequestPtr> pending;
    {
      const std::lock_guard lock(mutex_);
      for (const Link& link : links_) {
        if (link.in_flight) pending.push_back(link.in_flight);
      }
    }
    if (pending.empty()) return;
    wait_settled(pending, limit, caller);  // all at once: what one is held for may be another
  }
}

void Session::wait_settled(std::span<const RequestPtr> requests, TimePoint limit, Caller caller) {
  std::unique_lock lock(mutex_);
  Waiter waiter;
  waiter.caller = caller;
  while (!settled(requests)) {
    throw_failure();
    const TimePoint now = Clock::now();
    if (waiter.started == TimePoint()) {
      waiter.started = now;
      waiter.poll_next = now + kPollInterval;
      waiter.log_next = now + milliseconds(options_.straggler_log_ms);
    }
    if (now > limit) {
      throw Error(ErrorCode::kTimeout, straggler_text(requests, waiter, now));
    }
    check_deadlines(requests, waiter, now);
    serve_wait(requests, waiter, lock);
  }
}

bool Session::answered(std::span<const RequestPtr> requests) const {
  const std::lock_guard lock(mutex_);
  return std::all_of(requests.begin(), requests.end(),
                     [](const RequestPtr& request) { return request->done && !request->error; });
}

void Session::give_up(std::span<const RequestPtr> requests) {
  const std::lock_guard lock(mutex_);
  for (const RequestPtr& request : requests) requests_.erase(request->header.request_id);
}

bool Session::refused(std::span<const RequestPtr> requests) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(requests.begin(), requests.end(),
                     [](const RequestPtr& request) { return request->error.has_value(); });
}

bool Session::settled(std::span<const RequestPtr> requests) const {
  bool all = true;
  for (const RequestPtr& request : requests) {
    if (request->error) return true;
    all = all && request->done;
  }
  return all;
}

void Session::serve_wait(std::span<const RequestPtr> requests, Waiter& waiter,
                         std::unique_lock<std::mutex>& lock) {
  const uint64_t shortest = std::min(options_.probe_ms, options_.resend_ms);
  const auto slice =
      std::clamp<milliseconds>(milliseconds(shortest), milliseconds(1), kPollInterval);
  // Links that came back while nobody waited have left marks on the requests.
  auto frames = due_frames(requests, Clock::now());
  if (frames.empty() && !settled(requests)) {
    answered_.wait_for(lock, slice);
    if (settled(requests)) return;
    frames = due_frames(requests, Clock::now());
  }
  const TimePoint now = Clock::now();
  const bool poll = now >= waiter.poll_next;
  if (poll) waiter.poll_next = now + kPollInterval;
  std::string text;
  int level = kWarning;
  if (now >= waiter.log_next) {
    waiter.log_next = now + milliseconds(options_.straggler_log_ms);
    text = straggler_text(requests, waiter, now);
    const uint64_t stored_bytes = stored_meanwhile(requests);
    // Who sends a large model is at work, nobody's fault; who has stopped is told of.
    if (stored_bytes > waiter.stored_bytes) level = kInfo;
    waiter.stored_bytes = stored_bytes;
  }
  if (frames.empty() && !poll && text.empty()) return;
  lock.unlock();
  for (Outgoing& outgoing : frames) outgoing.connection->send(std::move(outgoing.frame));
  if (!text.empty() && options_.log) options_.log(level, text);
  const bool interrupted =
      poll && waiter.caller == Caller::kUser && options_.interrupted && options_.interrupted();
  lock.lock();
  if (interrupted) throw Error(ErrorCode::kInterrupted, "the wait was interrupted by a signal");
}

std::vector<Session::Outgoing> Session::due_frames(std::span<const RequestPtr> requests,
                                                   TimePoint now) {
  std::vector<Outgoing> frames;
  for (const RequestPtr& request : requests) {
    Link& link = links_.at(request->server);
    if (request->done || link.state != LinkState::kOpen) continue;
    const bool sequenced = request->header.sequence != 0;
    const auto since = now - request->sent;
    const bool repeat =
        !sequenced && !link.connection->reliable() && since >= milliseconds(options_.resend_ms);
    if (request->must_send || repeat) {
      if (!request->has_kept) {
        request->error =
            Error(ErrorCode::kPeerLost, describe(link) + " closed the in-process link during a " +
                                            name_of(request->header.kind));
        finish(*request);
        continue;
      }
      if (!may_send_again(*request, link)) return {};
      frames.push_back({link.connection, wire::Frame{request->header, request->kept.share()}});
      ++stats_.resent;
    } else if (sequenced && (request->must_probe || since >= milliseconds(options_.probe_ms))) {
      wire::FrameHeader probe = request->header;
      probe.kind = wire::FrameKind::kProbe;
      probe.coded = false;
      frames.push_back({link.connection, wire::Frame{probe, Buffer()}});
    } else {
      continue;
    }
    request->must_send = request->must_probe = false;
    request->sent = now;
  }
  return frames;
}

bool Session::may_send_again(Request& request, Link& link) {
  const bool retry = request.sent_on != 0 && request.sent_on != link.opened;
  request.sent_on = link.opened;
  if (!retry || ++request.retries <= options_.rpc_retries) return true;
  lose(link, std::string("its connection broke ") + std::to_string(request.retries) +
                 " times before a " + name_of(request.header.kind) +
                 " was answered; CPUDIST_RPC_RETRIES is " + std::to_string(options_.rpc_retries));
  return false;
}

void Session::check_deadlines(std::span<const RequestPtr> requests, const Waiter& waiter,
                              TimePoint now) const {
  for (const RequestPtr& request : requests) {
    if (request->done) continue;
    const Link& link = links_.at(request->server);
    const std::string what = std::string(name_of(request->header.kind)) + " at " + describe(link);
    // A server that answers probes is at work; only silence about the request counts here.
    if (now - std::max(request->heard, waiter.started) > milliseconds(options_.rpc_deadline_ms)) {
      throw no_answer(what, options_.rpc_deadline_ms);
    }
    if (now - waiter.started > milliseconds(options_.round_deadline_ms)) {
      throw too_late(straggler_text(requests, waiter, now), options_.round_deadline_ms);
    }
  }
}

std::string Session::straggler_text(std::span<const RequestPtr> requests, const Waiter& waiter,
                                    TimePoint now) const {
  std::set<uint32_t> ranks;
  std::string servers;
  std::string what;
  for (const RequestPtr& request : requests) {
    if (request->done) continue;
    what = name_of(request->header.kind);
    servers += (servers.empty() ? "" : ", ") + describe(links_.at(request->server));
    ranks.insert(request->waiting_for.begin(), request->waiting_for.end());
  }
  const auto waited = std::chrono::duration_cast<milliseconds>(now - waiter.started);
  return wait_text(what, waited, ranks, servers, stored_meanwhile(requests));
}

uint64_t Session::stored_meanwhile(std::span<const RequestPtr> requests) {
  uint64_t total = 0;
  for (const RequestPtr& request : requests) total += request->stored_bytes;
  return total;
}

// ---- links and liveness -------------------------------------------------------------------------
// The client's own thread connects, says hello, sends heartbeats, notices silence and replaces
// broken links. It never touches requests beyond marking them.

void Session::connect() {
  std::unique_lock lock(mutex_);
  throw_failure();
  if (started_) throw Error(ErrorCode::kInvalidArgument, "client: connect() was called before");
  const TimePoint now = Clock::now();
  started_ = true;
  for (Link& link : links_) {
    link.give_up = now + milliseconds(options_.connect_deadline_ms);
    link.try_next = now;
  }
  beat_next_ = now + transport::beat_interval(options_.liveness_ms);
  monitor_ = start_io_thread("the thread that keeps the links to servers", [this] { monitor(); });
  const auto all_open = [this] {
    return std::all_of(links_.begin(), links_.end(),
                       [](const Link& link) { return link.ever_open; });
  };
  while (!all_open()) {
    throw_failure();
    answered_.wait_for(lock, milliseconds(50));
    if (!options_.interrupted) continue;
    lock.unlock();
    const bool interrupted = options_.interrupted();
    lock.lock();
    if (interrupted) throw Error(ErrorCode::kInterrupted, "connect: interrupted by a signal");
  }
  throw_failure();
}

void Session::monitor() {
  std::unique_lock lock(mutex_);
  transport::Attendance attendance(options_.liveness_ms);
  while (!stopping_) {
    TimePoint next = Clock::now() + kLookAgain;
    try {
      look_after_links(lock, attendance);
      next = next_wakeup(Clock::now());
    } catch (const std::exception&) {
      // There is no memory. What was to be done is still to be done, at the next look.
      if (!lock.owns_lock()) lock.lock();
    }
    if (stopping_) break;
    changed_.wait_until(lock, next);
  }
}

void Session::look_after_links(std::unique_lock<std::mutex>& lock,
                               transport::Attendance& attendance) {
  // First: after an absence of this process it is not they who were silent.
  const TimePoint begun = Clock::now();
  beat(lock, begun, attendance.was_away(begun));
  const Clock::duration missed = attendance.missed();
  for (Link& link : links_) {
    if (failure_ || stopping_) break;
    const TimePoint now = Clock::now();
    const bool down = link.state == LinkState::kBroken || link.state == LinkState::kHandshake;
    if (down) link.give_up += missed;
    if (down && has_ended(link.process)) {
      lose(link, "its process has ended");
    } else if (down && now >= link.give_up) {
      lose(link, link.trouble.empty() ? "it does not answer a hello" : link.trouble);
    } else if (link.state == LinkState::kBroken && now >= link.try_next) {
      revive(link, lock);
      // That may have taken its time, at a server that is frozen; the others are to hear of this
      // trainer all the same.
      const TimePoint tried = Clock::now();
      beat(lock, tried, attendance.was_away(tried));
    } else if (link.state == LinkState::kHandshake) {
      repeat_hello(link, lock, now);
    } else {
      seekers_.seek_if_silent(link, now);
    }
  }
}

TimePoint Session::next_wakeup(TimePoint now) const {
  TimePoint next = std::min(beat_next_, now + transport::look_interval(options_.liveness_ms));
  if (failure_) return next;
  for (const Link& link : links_) {
    if (link.state == LinkState::kOpen) {
      next = std::min(next, link.heard + milliseconds(options_.liveness_ms + 1));
    } else if (link.state == LinkState::kBroken) {
      next = std::min({next, link.try_next, link.give_up});
      if (link.process.get() >= 0) next = std::min(next, now + transport::kEndLook);
    } else if (link.state == LinkState::kHandshake) {
      next = std::min({next, link.give_up, now + kLookAgain});
    }
  }
  return next;
}

void Session::beat(std::unique_lock<std::mutex>& lock, TimePoint now, bool was_away) {
  const bool due = now >= beat_next_;
  if (due) beat_next_ = now + transport::beat_interval(options_.liveness_ms);
  std::vector<std::shared_ptr<transport::Connection>> connections;
  for (Link& link : links_) {
    if (link.state != LinkState::kOpen) continue;
    const bool moved = transport::has_moved(*link.connection, link.bytes_seen);
    if (was_away || moved) link.heard = std::max(link.heard, now);
    if (!failure_ && now - link.heard > milliseconds(options_.liveness_ms)) {
      const bool tried = link.spare.tried > link.heard;
      lose(link, silence_text(options_.liveness_ms, tried ? link.trouble : ""));
    } else if (due) {
      connections.push_back(link.connection);
    }
  }
  if (connections.empty()) return;
  lock.unlock();
  for (const auto& connection : connections) {
    connection->send(wire::Frame{make_header(wire::FrameKind::kHeartbeat), Buffer()});
  }
  lock.lock();
}

void Session::revive(Link& link, std::unique_lock<std::mutex>& lock) {
  const TimePoint deadline =
      link.ever_open ? link.give_up : std::min(link.give_up, Clock::now() + kFirstAttempt);
  std::shared_ptr<transport::Connection> connection;
  std::string trouble;
  std::string used;
  std::optional<ErrorCode> code;
  lock.unlock();
  const TimePoint begun = Clock::now();
  for (const std::string& address : link.addresses) {  // fixed after construction
    try {
      connection = connector_->connect(address, deadline);
      used = address;
      break;
    } catch (const Error& error) {
      trouble = error.what();
      code = error.code();
      if (code == ErrorCode::kAuthentication) break;  // it is the cause, whatever others say
    }
  }
  lock.lock();
  if (!connection) {
    link.trouble.swap(trouble);
    link.gone = code == ErrorCode::kPeerLost || code == ErrorCode::kClosed;
    link.try_next = Clock::now() + pause_of(link);
    if (code == ErrorCode::kPeerLost && !stopping_ && !failure_) lose(link, link.trouble);
    // The same key is no better the next time, unless a stranger has for a while the port of a
    // server that this trainer has been with.
    if (code == ErrorCode::kAuthentication && !stopping_ && !link.ever_open) {
      link.state = LinkState::kClosed;
      fail(Error(*code, "server " + std::to_string(link.server) + " at " + link.trouble));
    }
    // The rank has ended for good, maybe because of a loss that is to be named first.
    const auto grace = milliseconds(options_.reconnect_grace_ms);
    if (code == ErrorCode::kClosed) link.give_up = std::min(link.give_up, Clock::now() + grace);
    return;
  }
  if (stopping_ || failure_) {
    lock.unlock();
    connection->close("the client is closed");
    lock.lock();
    return;
  }
  wire::Frame hello = make_hello(link);
  link.address.swap(used);
  link.connection = connection;
  link.state = LinkState::kHandshake;
  link.bytes_seen = 0;
  link.heard = link.hello_sent = Clock::now();
  link.spare.reach_took = link.heard - begun;
  lock.unlock();
  bool dead = false;
  try {
    connection->send(std::move(hello));
    dead = connection->closed();
  } catch (const std::bad_alloc&) {
    dead = true;  // nobody repeats a hello over a reliable link: another one is made
  }
  lock.lock();
  // on_close may have come before the link knew the connection.
  if (dead && link.connection == connection && link.state != LinkState::kClosed) {
    link.connection.reset();
    link.state = LinkState::kBroken;
    link.try_next = Clock::now() + pause_of(link);
  }
}

milliseconds Session::pause_of(Link& link) const {
  return transport::retry_pause(options_.trainer_rank, link.server, ++link.attempts);
}

void Session::repeat_hello(Link& link, std::unique_lock<std::mutex>& lock, TimePoint now) {
  const auto pause =
      std::min(milliseconds(options_.resend_ms), milliseconds(options_.reconnect_grace_ms / 5 + 1));
  if (link.connection->reliable() || now - link.hello_sent < pause) return;
  link.hello_sent = now;
  const auto connection = link.connection;
  wire::Frame hello = make_hello(link);
  lock.unlock();
  connection->send(std::move(hello));
  lock.lock();
}

void Session::lose(Link& link, const std::string& why) {
  // Made first: without memory for it the link is to be lost at the next look.
  const Error error =
      loss_of(describe(link), link.ever_open || link.gone, options_.connect_deadline_ms, why);
  link.state = LinkState::kClosed;
  out_of_reach_ = !link.gone;
  fail(error);
}

// Whoever goes on without the server that was there, goes on without this one, too.
void Session::lose_place(Link& link, const std::string& what) {
  lose(link, "another server has taken its place at " + link.address + ": " + what);
}

void Session::on_close(const std::shared_ptr<transport::Connection>& connection,
                       const std::string& reason) {
  const std::lock_guard lock(mutex_);
  Link* link = find_link(connection.get());
  if (link == nullptr) return;
  if (link->spare.connection == connection) return link->spare.connection.reset();
  const auto& spare = link->spare.connection;
  if (spare && !spare->closed() && link->state == LinkState::kOpen) {
    // The server has closed it for the other one, whose answer follows.
    take_spare(*link);
    changed_.notify_all();
    return;
  }
  link->closed_bytes_sent += connection->bytes_sent();
  link->closed_bytes_received += connection->bytes_received();
  link->connection.reset();
  if (link->state == LinkState::kClosed) return;
  const TimePoint now = Clock::now();
  if (link->state == LinkState::kOpen) {
    link->give_up = now + milliseconds(options_.reconnect_grace_ms);
  }
  // Who was not let in comes again a little later.
  const bool at_the_door = link->state == LinkState::kHandshake;
  link->state = LinkState::kBroken;
  link->try_next = at_the_door ? now + pause_of(*link) : now;
  changed_.notify_all();
  answered_.notify_all();
  link->trouble = reason;  // last: there may be no memory for it
}

}  // namespace cpudist::client
