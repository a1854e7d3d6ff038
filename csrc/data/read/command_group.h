// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The processes that one shell command starts, which end with it and with this process.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "base/descriptor.h"

namespace cpudist::data {

// A process group. The process that leads it is a guard: it reads a pipe that only this process
// (and its forks) can write to, and kills the group at the end of that pipe, so that nothing is
// left behind even by a process that is killed. Used by one thread.
class CommandGroup {
 public:
  // Starts the guard. Throws Error(kDataFile).
  CommandGroup();
  ~CommandGroup() { kill(); }
  CommandGroup(const CommandGroup&) = delete;
  CommandGroup& operator=(const CommandGroup&) = delete;

  // Runs `sh -c command` with these as its standard descriptors; once. Throws Error(kDataFile).
  void start(const std::string& command, int input, int output, int errors);
  // How the command ended, as waitpid() says it; nullopt: it has not. Throws Error(kDataFile): its
  // status was taken by other code of this process.
  std::optional<int> status();
  // Ends whatever there is, and waits for it. Idempotent.
  void kill() noexcept;

 private:
  Descriptor lifeline_;  // the end that is written to, by nobody
  pid_t guard_ = -1;
  pid_t command_ = -1;  // -1: not started, or its status is known
  std::optional<int> status_;
};

}  // namespace cpudist::data
