// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How much of a payload must have come before its reader is woken for it. A cable brings a large
// one in hundreds of segments, and a wake-up, a read and the acknowledgement that follows it cost
// more than the bytes of one.
#pragma once

#include <cstddef>

namespace cpudist::transport::tcp {

// Not thread-safe: its connection's reader has it.
class LowWater {
 public:
  // The socket is drained, and so many bytes of the payload that it brings are missing; none
  // between two frames, whose headers may be all that comes.
  void missing(int fd, size_t bytes);
  // Whether less than what is waited for may lie there, of which nobody tells.
  bool raised() const { return bytes_ > 1; }

 private:
  int bytes_ = 1;  // as the socket has it
};

}  // namespace cpudist::transport::tcp
