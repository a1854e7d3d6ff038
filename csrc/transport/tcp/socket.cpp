// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Making, tuning and connecting sockets.

#include "transport/tcp/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/errors.h"
#include "base/wait.h"

namespace cpudist::transport::tcp {
namespace {

// How soon a blocked connect notices stop().
constexpr auto kSlice = std::chrono::milliseconds(50);
// A unix socket whose backlog is full cannot be waited for, only asked again.
constexpr auto kBacklogPause = std::chrono::milliseconds(2);
// Since Linux 6.5; older headers do not name it.
#ifdef SO_PEERPIDFD
constexpr int kPeerPidfd = SO_PEERPIDFD;
#else
constexpr int kPeerPidfd = 77;
#endif

[[noreturn]] void refuse(const Address& address, const std::string& reason) {
  throw Error(ErrorCode::kAddress, "cannot connect to " + address.text + ": " + reason);
}

void check_time(const Address& address, TimePoint deadline, const std::atomic<bool>& stopped) {
  if (stopped.load()) refuse(address, "the connector stopped");
  if (Clock::now() >= deadline) refuse(address, "no answer within the deadline");
}

// The kernel may connect a socket to itself when nobody listens on a port of the ephemeral range.
bool connected_to_itself(int fd) {
  sockaddr_storage own{};
  sockaddr_storage other{};
  socklen_t own_length = sizeof(own);
  socklen_t other_length = sizeof(other);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&other), &other_length) != 0) {
    return false;
  }
  return own_length == other_length && std::memcmp(&own, &other, own_length) == 0;
}

void wait_established(int fd, const Address& address, TimePoint deadline,
                      const std::atomic<bool>& stopped) {
  while (true) {
    check_time(address, deadline, stopped);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    const auto slice = std::clamp<std::chrono::milliseconds>(left, {}, kSlice);
    pollfd entry{fd, POLLOUT, 0};
    const int ready = poll(&entry, 1, static_cast<int>(slice.count()));
    if (ready < 0 && errno != EINTR) refuse(address, describe_errno(errno));
    if (ready > 0) break;
  }
  int error = 0;
  socklen_t length = sizeof(error);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  if (error != 0) refuse(address, describe_errno(error));
}

// Proof of an end is no reason to turn a connection away: where descriptors are few it is done
// without. The lowest free number is given out, so that a high one says how many there are.
Descriptor affordable(Descriptor process) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return process;
  const auto number = static_cast<uint64_t>(std::max(process.get(), 0));
  return number < files.rlim_cur / 2 ? std::move(process) : Descriptor();
}

}  // namespace

Descriptor make_socket(const Address& address) {
  const int family = address.storage.ss_family;
  Descriptor fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) {
    throw Error(ErrorCode::kAddress,
                "cannot make a socket for " + address.text + ": " + describe_errno(errno));
  }
  return fd;
}

void tune(int fd, bool unix_socket, const ChannelLimits& limits) {
  if (!unix_socket) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return;  // the kernel sizes TCP buffers better than a constant does
  }
  const int size = static_cast<int>(std::min<uint64_t>(limits.socket_buffer_bytes, 1u << 30));
  // The first form needs a privilege, the second is capped by the host's settings; either may fail,
  // and the link works with small buffers too.
  if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size)) != 0) {
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
  }
}

void check_same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    throw Error(ErrorCode::kAddress,
                "cannot read the user of a unix socket's peer: " + describe_errno(errno));
  }
  if (peer.uid != geteuid()) {
    throw Error(ErrorCode::kAddress, "a unix socket's peer has another user: expected user id " +
                                         std::to_string(geteuid()) + ", found " +
                                         std::to_string(peer.uid));
  }
}

Descriptor peer_process(int fd) {
  int process = -1;
  socklen_t length = sizeof(process);
  if (getsockopt(fd, SOL_SOCKET, kPeerPidfd, &process, &length) == 0) {
    return affordable(Descriptor(process));
  }
#ifdef SYS_pidfd_open
  ucred peer{};
  length = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.pid <= 0) {
    return Descriptor();
  }
  Descriptor opened(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
  // While nothing has ended the stream the number is that of who connected, unless that one has
  // left its socket to a child and ended. Then it may be another's by now, whose life proves
  // nothing: the clocks decide.
  char byte = 0;
  const ssize_t left = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  const bool open = left < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  if (open) return affordable(std::move(opened));
#endif
  return Descriptor();
}

Descriptor connect_socket(const Address& address, TimePoint deadline,
                          const std::atomic<bool>& stopped) {
  Descriptor fd = make_socket(address);
  const auto* target = reinterpret_cast<const sockaddr*>(&address.storage);
  while (true) {
    check_time(address, deadline, stopped);
    if (connect(fd.get(), target, address.length) == 0) break;
    if (errno == EINTR) continue;
    if (errno == EINPROGRESS || errno == EALREADY) {
      wait_established(fd.get(), address, deadline, stopped);
      break;
    }
    if (errno == EISCONN) break;
    if (errno != EAGAIN) refuse(address, describe_errno(errno));
    let_pass(kBacklogPause);
  }
  if (!address.unix_socket && connected_to_itself(fd.get())) {
    refuse(address, "nobody listens there");
  }
  return fd;
}

}  // namespace cpudist::transport::tcp
