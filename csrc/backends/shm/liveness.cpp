// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Watches processes by descriptors, and by id where the kernel has no such descriptors.
#include "backends/shm/liveness.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string>

#include "base/files.h"
#include "base/process_end.h"

namespace cpudist::shm {

void Liveness::watch(const std::vector<int>& pids) {
  for (const int pid : pids) {
    const bool own = pid == ::getpid();
    const int fd = own ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
    watched_.push_back({pid, Descriptor(fd)});
  }
}

bool Liveness::ended(int rank) const {
  const Watched& one = watched_[static_cast<size_t>(rank)];
  if (one.pid == ::getpid()) return false;
  if (one.process.get() < 0) return ::kill(one.pid, 0) != 0 && errno == ESRCH;
  return has_ended(one.process);
}

bool Liveness::stopped(int rank) const {
  const std::string text = files::read_text("/proc/" + std::to_string(pid(rank)) + "/stat");
  const size_t name_end = text.rfind(") ");
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return false;
  const char state = text[name_end + 2];
  return state == 'T' || state == 't';
}

}  // namespace cpudist::shm
