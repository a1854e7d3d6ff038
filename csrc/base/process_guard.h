// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Remembers which process made an object. After fork() the child holds copies of sockets, threads
// and locks that belong to the parent: it must not use them, only forget them.
#pragma once

#include <unistd.h>

#include <string>

#include "base/errors.h"

namespace cpudist {

class ProcessGuard {
 public:
  bool forked() const { return getpid() != created_in_; }
  void check(const char* what) const {
    const pid_t used_in = getpid();
    if (used_in == created_in_) return;
    throw Error(ErrorCode::kClosed, std::string(what) + " created in process " +
                                        std::to_string(created_in_) + ", used in process " +
                                        std::to_string(used_in) +
                                        " after fork: make a new one in the child");
  }

 private:
  pid_t created_in_ = getpid();
};

}  // namespace cpudist
