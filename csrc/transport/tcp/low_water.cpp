// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/tcp/low_water.h"

#include <sys/socket.h>

#include <algorithm>

namespace cpudist::transport::tcp {
namespace {

// Of that many the first bytes are still in the cache when the last ones have come, and a receive
// window that has not grown yet holds as much. The system wakes the reader of a full one anyway.
constexpr size_t kMost = 64 * 1024;
// What comes with one wake-up in any case.
constexpr size_t kLeast = 4 * 1024;

}  // namespace

void LowWater::missing(int fd, size_t bytes) {
  // The end of a payload is told as soon as it is there.
  const int wanted = bytes < kLeast ? 1 : static_cast<int>(std::min(bytes, kMost));
  if (wanted == bytes_) return;
  // Where it fails the reader is woken as before: too often, or for less than it waits for.
  if (setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof(wanted)) == 0) bytes_ = wanted;
}

}  // namespace cpudist::transport::tcp
