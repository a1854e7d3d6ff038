// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The server side: binding, accepting, spreading connections over the reactors.

#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/errors.h"
#include "transport/tcp/channel.h"
#include "transport/tcp/connection.h"

namespace cpudist::transport {
namespace tcp {
namespace {

constexpr int kBacklog = 4096;
// Then others have their turn: those that have a place at the door above all.
constexpr size_t kAcceptsAtOnce = 8;
// Without free file descriptors a waiting connection stays readable: look again later.
constexpr auto kPauseWithoutDescriptors = std::chrono::milliseconds(50);
// Without a place at the door: those who have one get on meanwhile, or are asked for it.
constexpr auto kPauseAtTheDoor = std::chrono::milliseconds(5);
// After somebody was turned away: for so long the system keeps those who say nothing, without a
// descriptor, and hands over who has spoken.
constexpr auto kCrowded = std::chrono::seconds(2);

using Reactors = std::vector<std::shared_ptr<Reactor>>;

std::string peer_text(int fd, bool unix_socket) {
  if (unix_socket) {
    ucred peer{};
    socklen_t length = sizeof(peer);
    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length);
    return "unix:pid " + std::to_string(peer.pid);
  }
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  char ip[NI_MAXHOST] = "?";
  char port[NI_MAXSERV] = "?";
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &length) == 0) {
    getnameinfo(reinterpret_cast<const sockaddr*>(&storage), length, ip, sizeof(ip), port,
                sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV);
  }
  return storage.ss_family == AF_INET6 ? "tcp:[" + std::string(ip) + "]:" + port
                                       : "tcp:" + std::string(ip) + ":" + port;
}

std::string without_port(const std::string& address) {
  return address.substr(0, address.rfind(':'));
}

// Whether the first frame is there, whole, to be read without a wait.
bool has_spoken(int fd, uint64_t payload_limit_bytes) {
  int bytes = 0;
  std::array<uint8_t, wire::kHeaderBytes> header;
  if (ioctl(fd, FIONREAD, &bytes) != 0 || static_cast<size_t>(bytes) < header.size()) return false;
  const ssize_t found = recv(fd, header.data(), header.size(), MSG_PEEK | MSG_DONTWAIT);
  if (found != static_cast<ssize_t>(header.size())) return false;
  try {
    const wire::FrameHeader first = wire::decode_header(header.data(), payload_limit_bytes);
    return first.length <= static_cast<size_t>(bytes) - header.size();
  } catch (const Error&) {
    return false;
  }
}

// One listening socket, watched by the first reactor.
class Acceptor final : public Reactor::Source, public std::enable_shared_from_this<Acceptor> {
 public:
  Acceptor(Descriptor fd, std::vector<std::weak_ptr<Reactor>> reactors, ConnectionOptions options)
      : fd_(std::move(fd)), reactors_(std::move(reactors)), options_(std::move(options)) {}

  void start() { token_ = reactors_[0].lock()->watch(fd_.get(), shared_from_this(), EPOLLIN); }

  void on_ready(uint32_t) override {
    const bool full = !options_.unix_socket && options_.door->full();
    for (size_t i = 0; i < kAcceptsAtOnce; ++i) {
      Descriptor fd(accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (fd.get() >= 0) {
        adopt(std::move(fd));
        continue;
      }
      const int error = errno;
      if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
        return pause(kPauseWithoutDescriptors);
      }
      // Of what is left, errors of one connection that died in the backlog must not stop the rest.
      if (error != ECONNABORTED && error != EINTR && error != EPROTO) return;
    }
    // Those that were accepted had come with their first word, or were turned away.
    if (full) pause(kPauseAtTheDoor);
  }

  bool on_stop() override {
    fd_.reset();
    return false;
  }

 private:
  void adopt(Descriptor fd) {
    ConnectionOptions options = options_;
    try {
      if (options.unix_socket) check_same_user(fd.get());
      options.peer_address = peer_text(fd.get(), options.unix_socket);
      const auto reactor = reactors_[next_++ % reactors_.size()].lock();
      if (!reactor) return;
      // Who has the same user on this host could end this process as well as fill it.
      std::unique_ptr<Door::Guest> place;
      if (!options.unix_socket) {
        place = options.door->arrive(without_port(options.peer_address),
                                     has_spoken(fd.get(), options.limits.pre_hello_limit_bytes));
        // Too many of its address: it comes again. Those of other addresses do not wait for them.
        if (!place) return hear_first();
      }
      tune(fd.get(), options.unix_socket, options.limits);
      const auto connection =
          std::make_shared<TcpConnection>(std::move(fd), reactor, std::move(options));
      if (place) connection->take_place(std::move(place));
      reactor->post([connection] { connection->start(); });
    } catch (const std::exception&) {
      // A stranger, or no memory for one more connection: it sees a closed socket.
    }
  }

  // Until nobody has been turned away for a while. Where the system cannot, they are looked at and
  // turned away as before.
  void hear_first() {
    crowded_ = Clock::now() + kCrowded;
    if (hearing_first_) return;
    look_whether_crowded();
    hearing_first_ = true;
    keep_silent_out(true);
  }

  void look_whether_crowded() {
    reactors_[0].lock()->schedule(crowded_, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (!self || self->fd_.get() < 0) return;
      if (Clock::now() < self->crowded_) return self->look_whether_crowded();
      self->hearing_first_ = false;
      self->keep_silent_out(false);
    });
  }

  void keep_silent_out(bool kept) {
    const int seconds = kept ? 1 : 0;
    setsockopt(fd_.get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof(seconds));
  }

  void pause(std::chrono::milliseconds how_long) {
    const auto reactor = reactors_[0].lock();
    reactor->change(fd_.get(), token_, 0);
    reactor->schedule(Clock::now() + how_long, [self = shared_from_this()] {
      if (const auto alive = self->reactors_[0].lock()) {
        alive->change(self->fd_.get(), self->token_, EPOLLIN);
      }
    });
  }

  Descriptor fd_;
  std::vector<std::weak_ptr<Reactor>> reactors_;  // the listener owns them, they own this
  ConnectionOptions options_;
  uint64_t token_ = 0;
  size_t next_ = 0;
  TimePoint crowded_;  // somebody has been turned away lately, until then
  bool hearing_first_ = false;
};

Descriptor try_listen(const Address& address, int* error) {
  Descriptor fd = make_socket(address);
  const int on = 1;
  // A port whose last owner has just ended can be had again.
  if (!address.unix_socket) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const auto* own = reinterpret_cast<const sockaddr*>(&address.storage);
  if (bind(fd.get(), own, address.length) == 0 && listen(fd.get(), kBacklog) == 0) return fd;
  *error = errno;
  return Descriptor();
}

Descriptor listen_on_port_range(const ListenOptions& options) {
  const uint16_t last = std::max(options.port_first, options.port_last);
  int error = 0;
  for (uint32_t port = options.port_first; port <= last; ++port) {
    Descriptor fd =
        try_listen(make_tcp_address(options.bind_address, static_cast<uint16_t>(port)), &error);
    if (fd.get() >= 0) return fd;
    if (error != EADDRINUSE && error != EACCES) break;  // the next port will not do better
  }
  const std::string ports =
      options.port_first == 0
          ? "any port"
          : "a port of " + std::to_string(options.port_first) + "-" + std::to_string(last);
  throw Error(ErrorCode::kAddress, "cannot listen on " + options.bind_address + ", " + ports +
                                       ": " + describe_errno(error) +
                                       "; set CPUDIST_BIND and CPUDIST_PORTS to an address of this "
                                       "host and to ports that are free");
}

class TcpListener final : public Listener {
 public:
  TcpListener(const ListenOptions& options, ConnectionHandler* handler) {
    ConnectionOptions connection;
    connection.handler = handler;
    connection.limits = options.limits;
    connection.pool = std::make_shared<BufferPool>(kPoolBytes);
    connection.listener_side = true;
    connection.credentials = options.credentials;
    connection.door = options.door ? options.door : std::make_shared<Door>();
    const auto budget = std::make_shared<FlowBudget>(options.flow.budget_bytes);
    connection.incoming = std::make_shared<Incoming>(options.flow, budget);
    connection.budget = budget;
    Descriptor tcp = listen_on_port_range(options);
    const std::string tcp_text = bound_address(tcp.get(), options.bind_address);
    for (uint32_t i = 0; i < std::max(options.threads, 1u); ++i) {
      reactors_.push_back(std::make_shared<Reactor>());
    }
    // Best first: a client on this host takes the unix socket.
    if (options.unix_socket) add_unix(connection);
    addresses_.push_back(tcp_text);
    connection.own_address = tcp_text;
    add(std::move(tcp), connection);
  }
  ~TcpListener() override { stop(); }
  TcpListener(const TcpListener&) = delete;
  TcpListener& operator=(const TcpListener&) = delete;

  std::vector<std::string> addresses() const override { return addresses_; }
  void stop() override {
    for (const auto& reactor : reactors_) reactor->stop();
  }

 private:
  void add_unix(ConnectionOptions connection) {
    const std::string boot = boot_id();
    if (boot.empty()) return;  // a client could not tell whether it is on the same host
    const Address address = make_unix_address(boot);
    int error = 0;
    Descriptor fd = try_listen(address, &error);
    if (fd.get() < 0) {
      throw Error(ErrorCode::kAddress,
                  "cannot listen on " + address.text + ": " + describe_errno(error));
    }
    connection.unix_socket = true;
    connection.own_address = address.text;
    addresses_.push_back(address.text);
    add(std::move(fd), connection);
  }

  void add(Descriptor fd, const ConnectionOptions& connection) {
    const auto acceptor = std::make_shared<Acceptor>(
        std::move(fd), std::vector<std::weak_ptr<Reactor>>(reactors_.begin(), reactors_.end()),
        connection);
    reactors_[0]->post([acceptor] { acceptor->start(); });
  }

  std::vector<std::string> addresses_;
  Reactors reactors_;
};

}  // namespace
}  // namespace tcp

std::unique_ptr<Listener> listen_tcp(const ListenOptions& options, ConnectionHandler* handler) {
  return std::make_unique<tcp::TcpListener>(options, handler);
}

}  // namespace cpudist::transport
