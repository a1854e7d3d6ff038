// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Sockets and their addresses: "tcp:IP:PORT" (IPv6 in brackets) and "unix:@NAME#BOOT_ID", an
// abstract unix socket, which leaves no file and can be reached from the same boot of the same host
// only.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "base/descriptor.h"
#include "transport/channel.h"

namespace cpudist::transport::tcp {

struct Address {
  bool unix_socket = false;
  std::string text;     // as given
  std::string boot_id;  // unix sockets
  sockaddr_storage storage{};
  socklen_t length = 0;
};

// "Connection refused (errno 111)".
std::string describe_errno(int error);
// Of this boot of the host; empty where the kernel does not tell.
std::string boot_id();

// Throws Error(kAddress) when the text is not an address.
Address parse_address(const std::string& text);
// `ip` numeric.
Address make_tcp_address(const std::string& ip, uint16_t port);
// A name nobody else has.
Address make_unix_address(const std::string& boot);
// The address with the port the kernel chose.
std::string bound_address(int fd, const std::string& ip);

// Non-blocking, close-on-exec. Throws Error(kAddress).
Descriptor make_socket(const Address& address);
// No delays on TCP, large buffers on unix sockets (as far as the kernel allows).
void tune(int fd, bool unix_socket, const ChannelLimits& limits);
// Throws Error(kAddress): expected and found user id of the process at the other end.
void check_same_user(int fd);
// A pidfd of the process that has connected, or listens, at the other end of a unix socket; nothing
// where the kernel does not tell.
Descriptor peer_process(int fd);
// Established within the deadline or Error(kAddress) with the reason. `stopped` ends the wait.
Descriptor connect_socket(const Address& address, TimePoint deadline,
                          const std::atomic<bool>& stopped);

}  // namespace cpudist::transport::tcp
