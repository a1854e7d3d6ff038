// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One rank of a group whose ranks share a host: its collectives and its messages.
#pragma once

#include <chrono>
#include <utility>
#include <vector>

#include "backends/shm/engine.h"
#include "backends/shm/messages.h"

namespace cpudist::shm {

class Group {
 public:
  Group(Segment segment, int rank, std::vector<int> names, std::chrono::milliseconds timeout)
      : engine(std::move(segment), rank, std::move(names), timeout), messages(engine.channel()) {}
  ~Group() { close(); }

  void close() {
    if (!engine.forked()) engine.channel().stop();
    messages.close();
    engine.close();
  }

  Engine engine;
  Messages messages;
};

}  // namespace cpudist::shm
