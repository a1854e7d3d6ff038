// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Whether another process of this host has ended, which is proof that nothing more comes from it.
#pragma once

#include <poll.h>

#include "base/descriptor.h"

namespace cpudist {

// Of a pidfd, which is of one process for ever: its number may be another's later. False where
// there is none.
inline bool has_ended(const Descriptor& process) noexcept {
  if (process.get() < 0) return false;
  pollfd entry{process.get(), POLLIN, 0};
  return poll(&entry, 1, 0) > 0 && (entry.revents & (POLLIN | POLLHUP)) != 0;
}

}  // namespace cpudist
