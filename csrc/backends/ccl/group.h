// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A communicator of oneCCL, and the store that it reads and writes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/ccl/engine.h"

namespace cpudist::backends::ccl {

class Group {
 public:
  // Makes the communicator. Throws std::runtime_error.
  Group(const cpudist_ccl_shim& calls, GroupOptions options, Clock::time_point deadline);
  ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void* communicator() const { return communicator_; }
  const std::vector<Peer>& peers() const { return options_.peers; }

  // Why it cannot be used; empty while it can.
  const std::string& failure() const { return failure_; }
  void fail(const std::string& failure) { failure_ = failure; }

  // Destroys the communicator, unless it is unusable: then oneCCL would wait for the others.
  void release(const cpudist_ccl_shim& calls);

 private:
  static int get(void* context, const char* key, void* sink,
                 void (*emit)(void* sink, const char* data, size_t size));
  static int set(void* context, const char* key, const char* data, size_t size);

  GroupOptions options_;
  Clock::time_point deadline_;
  bool made_ = false;
  std::string store_error_;
  std::string failure_;
  void* communicator_ = nullptr;
};

}  // namespace cpudist::backends::ccl
