// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Whether the processes of the other ranks are there, and what the kernel says they do.
#pragma once

#include <string>
#include <vector>

#include "base/descriptor.h"

namespace cpudist::shm {

class Liveness {
 public:
  Liveness() = default;
  ~Liveness() = default;
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  // Begins to watch, by rank; of the own process there is nothing to watch.
  void watch(const std::vector<int>& pids);
  bool ended(int rank) const;
  // Whether a signal or a debugger has stopped it.
  bool stopped(int rank) const;
  int pid(int rank) const { return watched_[static_cast<size_t>(rank)].pid; }

 private:
  struct Watched {
    int pid;
    Descriptor process;  // ids are reused, descriptors are not
  };
  std::vector<Watched> watched_;
};

}  // namespace cpudist::shm
