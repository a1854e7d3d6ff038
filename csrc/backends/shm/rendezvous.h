// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How the ranks of a group find out who shares a host, and open the memory of that host.
#pragma once

#include <string>
#include <vector>

#include "backends/shm/segment.h"

namespace cpudist::shm {

// Where ranks write what others read.
class Board {
 public:
  virtual ~Board() = default;
  virtual void put(const std::string& key, const std::string& value) = 0;
  // Waits for the key; throws if it does not come.
  virtual std::string get(const std::string& key) = 0;
};

struct Host {
  Segment segment;
  std::vector<int> members;    // ranks that share it, ascending
  std::vector<int> leaders;    // the first rank of every host, ascending
  std::vector<int> leader_of;  // by rank, the first rank of its host
  int leader;                  // of this host
};

// This machine since its last start, as seen from this process's namespace of process ids.
std::string host_identity();

// Ranks are on one host if they say the same identity and can open the memory of its first rank;
// names of hosts do not count. Every rank of the group calls it.
Host meet(Board& board, int rank, int size, const std::string& identity);

}  // namespace cpudist::shm
