// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One rank after the other joins the first host it can, or begins one.
#include "backends/shm/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <random>
#include <sstream>
#include <utility>

#include "base/errors.h"
#include "base/files.h"

namespace cpudist::shm {

namespace {

// What a rank says of itself. Only of leaders the memory is told.
struct Entry {
  int leader = -1;
  std::string identity;
  int pid = 0;
  int fd = -1;
  uint64_t nonce = 0;
};

std::string key_of(int rank) { return "cpudist/shm/" + std::to_string(rank); }

std::string text_of(const Entry& entry) {
  std::ostringstream text;
  text << entry.leader << ' ' << entry.pid << ' ' << entry.fd << ' ' << entry.nonce << ' '
       << entry.identity;
  return text.str();
}

Entry read_entry(Board& board, int rank, int size) {
  Entry entry;
  std::istringstream text(board.get(key_of(rank)));
  text >> entry.leader >> entry.pid >> entry.fd >> entry.nonce >> std::ws;
  std::getline(text, entry.identity);
  if (text.fail() || entry.leader < 0 || entry.leader >= size) {
    throw Error(ErrorCode::kProtocol,
                "backend shm: what rank " + std::to_string(rank) +
                    " wrote into the store cannot be read; use the same version of "
                    "torch_cpudist on all ranks");
  }
  return entry;
}

uint64_t random_number() {
  std::random_device source;
  return uint64_t{source()} << 32 | source();
}

}  // namespace

std::string host_identity() {
  std::string boot = files::read_text("/proc/sys/kernel/random/boot_id");
  boot.erase(std::min(boot.size(), boot.find('\n')));
  std::array<char, 64> space{};
  const ssize_t length = ::readlink("/proc/self/ns/pid", space.data(), space.size());
  return boot + " " + std::string(space.data(), length > 0 ? static_cast<size_t>(length) : 0);
}

Host meet(Board& board, int rank, int size, const std::string& identity) {
  std::vector<int> leader_of(static_cast<size_t>(size), -1);
  Entry own;
  own.identity = identity;
  own.leader = rank;
  own.pid = ::getpid();
  Segment segment = Segment::none(size);
  for (int other = 0; other < rank; ++other) {
    const Entry entry = read_entry(board, other, size);
    leader_of[static_cast<size_t>(other)] = entry.leader;
    if (segment || entry.leader != other || entry.identity != identity) continue;
    segment = Segment::open(size, entry.nonce, entry.pid, entry.fd);
    if (segment) own.leader = other;
  }
  if (!segment) {
    own.nonce = random_number();
    segment = Segment::create(size, own.nonce);
    own.fd = segment.fd();
  }
  leader_of[static_cast<size_t>(rank)] = own.leader;
  board.put(key_of(rank), text_of(own));
  for (int other = rank + 1; other < size; ++other) {
    leader_of[static_cast<size_t>(other)] = read_entry(board, other, size).leader;
  }
  Host host{std::move(segment), {}, {}, leader_of, own.leader};
  for (int other = 0; other < size; ++other) {
    const int leader = leader_of[static_cast<size_t>(other)];
    if (leader == own.leader) host.members.push_back(other);
    if (leader == other) host.leaders.push_back(other);
  }
  return host;
}

}  // namespace cpudist::shm
