// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Addresses from text and back.

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>

#include "base/errors.h"
#include "base/files.h"
#include "transport/tcp/socket.h"

namespace cpudist::transport::tcp {
namespace {

constexpr char kTcpScheme[] = "tcp:";
constexpr char kUnixScheme[] = "unix:@";

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::kAddress,
              "expected an address tcp:IP:PORT, tcp:[IPv6]:PORT or unix:@NAME#BOOT_ID, found '" +
                  text.substr(0, 200) + "'");
}

std::string join(const std::string& ip, uint16_t port) {
  const bool six = ip.find(':') != std::string::npos;
  return kTcpScheme + (six ? "[" + ip + "]" : ip) + ":" + std::to_string(port);
}

Address parse_tcp(const std::string& text) {
  const std::string rest = text.substr(sizeof(kTcpScheme) - 1);
  const size_t colon = rest.rfind(':');
  if (colon == std::string::npos) refuse(text);
  std::string ip = rest.substr(0, colon);
  if (ip.size() >= 2 && ip.front() == '[' && ip.back() == ']') ip = ip.substr(1, ip.size() - 2);
  uint16_t port = 0;
  const char* end = rest.data() + rest.size();
  const auto parsed = std::from_chars(rest.data() + colon + 1, end, port);
  if (parsed.ec != std::errc() || parsed.ptr != end || port == 0) refuse(text);
  return make_tcp_address(ip, port);
}

Address unix_address(const std::string& name, const std::string& boot) {
  Address address;
  address.unix_socket = true;
  address.text = kUnixScheme + name + "#" + boot;
  address.boot_id = boot;
  sockaddr_un path{};
  path.sun_family = AF_UNIX;
  // sun_path[0] stays zero: an abstract name.
  if (name.empty() || name.size() > sizeof(path.sun_path) - 1) refuse(address.text);
  std::memcpy(path.sun_path + 1, name.data(), name.size());
  std::memcpy(&address.storage, &path, sizeof(path));
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Address parse_unix(const std::string& text) {
  const std::string rest = text.substr(sizeof(kUnixScheme) - 1);
  const size_t hash = rest.find('#');
  if (hash == std::string::npos || hash + 1 == rest.size()) refuse(text);
  return unix_address(rest.substr(0, hash), rest.substr(hash + 1));
}

}  // namespace

std::string describe_errno(int error) {
  char text[128] = {};
  // The GNU version returns the text, which need not be in the buffer.
  return std::string(strerror_r(error, text, sizeof(text))) + " (errno " + std::to_string(error) +
         ")";
}

std::string boot_id() {
  const std::string id = files::read_text("/proc/sys/kernel/random/boot_id");
  return id.substr(0, id.find('\n'));
}

Address parse_address(const std::string& text) {
  if (text.starts_with(kTcpScheme)) return parse_tcp(text);
  if (text.starts_with(kUnixScheme)) return parse_unix(text);
  refuse(text);
}

Address make_tcp_address(const std::string& ip, uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int failed = getaddrinfo(ip.c_str(), std::to_string(port).c_str(), &hints, &found);
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  if (failed != 0 || found == nullptr || found->ai_addrlen > sizeof(sockaddr_storage)) {
    throw Error(ErrorCode::kAddress, "expected a numeric IP address, found '" + ip.substr(0, 200) +
                                         "': " + gai_strerror(failed));
  }
  Address address;
  address.text = join(ip, port);
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  return address;
}

Address make_unix_address(const std::string& boot) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::random_device random;
  std::string name = "cpudist-";
  for (int i = 0; i < 4; ++i) {
    uint32_t word = random();
    for (int digit = 0; digit < 8; ++digit, word >>= 4) name += kDigits[word & 0xfu];
  }
  return unix_address(name, boot);
}

std::string bound_address(int fd, const std::string& ip) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
    throw Error(ErrorCode::kAddress,
                "cannot read the port bound on " + ip + ": " + describe_errno(errno));
  }
  uint16_t port = 0;
  if (storage.ss_family == AF_INET6) {
    sockaddr_in6 six;
    std::memcpy(&six, &storage, sizeof(six));
    port = ntohs(six.sin6_port);
  } else {
    sockaddr_in four;
    std::memcpy(&four, &storage, sizeof(four));
    port = ntohs(four.sin_port);
  }
  return join(ip, port);
}

}  // namespace cpudist::transport::tcp
