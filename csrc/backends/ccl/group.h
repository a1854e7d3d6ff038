// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A communicator of oneCCL, and the store that it reads and writes.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/ccl/engine.h"

namespace cpudist::backends::ccl {

class Group {
 public:
  // Makes the communicator. Throws Error: kTimeout if the members have not come until the deadline,
  // else kPeerLost.
  Group(const cpudist_ccl_shim& calls, GroupOptions options, Clock::time_point deadline);
  ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void* communicator() const { return communicator_; }
  const std::vector<Peer>& peers() const { return options_.peers; }

  // From now on it cannot be used.
  void fail(const Error& error) { failure_ = error; }

  // Whether a failure ends the messages with one peer only, and what happened to whom.
  bool pairwise() const { return pairwise_; }
  void fail_pairwise() { pairwise_ = true; }
  // Nothing while there can be calls, or messages with this peer.
  std::optional<Error> failure_of(int peer) const;
  void fail_pair(int peer, const Error& error) { lost_.emplace(peer, error); }
  // Whether something was given up that oneCCL may still work on.
  bool abandoned() const { return failure_ || !lost_.empty(); }

  // When the process of a peer was first found ended; nothing has come from it since.
  std::map<int, Clock::time_point>& ended_since() { return ended_since_; }

  // Destroys the communicator, unless it is unusable: then oneCCL would wait for the others.
  void release(const cpudist_ccl_shim& calls);

 private:
  static int get(void* context, const char* key, void* sink,
                 void (*emit)(void* sink, const char* data, size_t size));
  static int set(void* context, const char* key, const char* data, size_t size);

  GroupOptions options_;
  Clock::time_point deadline_;
  bool made_ = false;
  std::optional<Error> store_error_;
  std::optional<Error> failure_;
  bool pairwise_ = false;
  std::map<int, Error> lost_;
  std::map<int, Clock::time_point> ended_since_;
  void* communicator_ = nullptr;
};

}  // namespace cpudist::backends::ccl
