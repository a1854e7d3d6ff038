// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Sending requests and matching replies. Waiting stands in client_wait.cpp, links and liveness in
// client_monitor.cpp.
#include "client/session.h"

#include <algorithm>
#include <utility>

namespace cpudist::client {

const char* name_of(wire::FrameKind kind) {
  switch (kind) {
    case wire::FrameKind::kHello:
      return "hello";
    case wire::FrameKind::kHeartbeat:
      return "heartbeat";
    case wire::FrameKind::kHeartbeatAck:
      return "heartbeat answer";
    case wire::FrameKind::kError:
      return "error";
    case wire::FrameKind::kOpen:
      return "open";
    case wire::FrameKind::kStore:
      return "store";
    case wire::FrameKind::kReady:
      return "ready";
    case wire::FrameKind::kPush:
      return "push";
    case wire::FrameKind::kCommit:
      return "commit";
    case wire::FrameKind::kLeave:
      return "leave";
    case wire::FrameKind::kJoin:
      return "join";
    case wire::FrameKind::kBarrier:
      return "barrier";
    case wire::FrameKind::kClose:
      return "close";
    case wire::FrameKind::kGoodbye:
      return "goodbye";
    case wire::FrameKind::kProbe:
      return "probe";
    case wire::FrameKind::kProbeReply:
      return "probe reply";
    case wire::FrameKind::kPullRows:
      return "pull";
    case wire::FrameKind::kPullDense:
      return "dense pull";
    case wire::FrameKind::kFetchState:
      return "fetch";
    case wire::FrameKind::kReply:
      return "reply";
    case wire::FrameKind::kShuffle:
    case wire::FrameKind::kShuffleEnd:
    case wire::FrameKind::kShuffleDone:
    case wire::FrameKind::kShuffleAck:
      return "shuffle";
  }
  return "unknown frame";
}

namespace {

bool is_sequenced(wire::FrameKind kind) {
  return kind >= wire::FrameKind::kOpen && kind <= wire::FrameKind::kGoodbye;
}

bool is_inproc(const std::string& address) { return address.starts_with("inproc:"); }

}  // namespace

Session::Session(ClientOptions options, const ConnectorFactory& make_connector)
    : options_(std::move(options)) {
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
    return link.connection.get() == connection;
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
    if (is_sequenced(kind)) {
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
  {
    const std::lock_guard lock(mutex_);
    Link* link = find_link(connection.get());
    if (link == nullptr || link->state == LinkState::kClosed) return;
    link->heard = Clock::now();
    switch (frame.header.kind) {
      case wire::FrameKind::kHello:
        accept_hello(*link, frame);
        break;
      case wire::FrameKind::kHeartbeat:
        acknowledge = true;
        break;
      case wire::FrameKind::kHeartbeatAck:
        break;
      case wire::FrameKind::kError:
        accept_error(*link, frame);
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
  if (acknowledge)
    connection->send(wire::Frame{make_header(wire::FrameKind::kHeartbeatAck), Buffer()});
}

void Session::accept_hello(Link& link, const wire::Frame& frame) {
  if (link.state != LinkState::kHandshake) return;  // a duplicate
  const wire::Hello hello = wire::decode_hello({frame.payload.data(), frame.payload.size()});
  link.host = hello.host;
  if (frame.header.run_id != options_.run_id || hello.shard_id != link.server ||
      hello.server_count != server_count() || hello.trainer_count != options_.trainer_count) {
    fail(Error(ErrorCode::kConfigMismatch,
               describe(link) + " is shard " + std::to_string(hello.shard_id) + " of " +
                   std::to_string(hello.server_count) + " for " +
                   std::to_string(hello.trainer_count) + " trainers in run " +
                   std::to_string(frame.header.run_id) + "; expected shard " +
                   std::to_string(link.server) + " of " + std::to_string(server_count()) + " for " +
                   std::to_string(options_.trainer_count) + " trainers in run " +
                   std::to_string(options_.run_id)));
    return;
  }
  link.state = LinkState::kOpen;
  if (link.ever_open) ++stats_.reconnects;
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

void Session::accept_error(Link& link, const wire::Frame& frame) {
  const wire::ErrorReply reply = wire::decode_error({frame.payload.data(), frame.payload.size()});
  const Error error(reply.code, reply.message);
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
  const wire::ProbeReply reply =
      wire::decode_probe_reply({frame.payload.data(), frame.payload.size()});
  request.heard = Clock::now();
  request.waiting_for = reply.waiting_for;
  if (!reply.known) {
    request.must_send = true;
    answered_.notify_all();
  }
}

void Session::check() const {
  const std::lock_guard lock(mutex_);
  throw_failure();
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
  if (monitor_.joinable()) monitor_.join();
  if (connector_) connector_->stop();
}

void Session::close_links(const std::string& reason) {
  std::vector<std::shared_ptr<transport::Connection>> connections;
  {
    const std::lock_guard lock(mutex_);
    for (Link& link : links_) {
      link.state = LinkState::kClosed;
      if (link.connection) connections.push_back(link.connection);
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

}  // namespace cpudist::client
