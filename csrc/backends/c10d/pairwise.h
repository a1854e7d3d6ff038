// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a backend of our own offers to callers whose messages with one rank have nothing to do with
// those with another: a lost rank then fails the messages with it, and no others, so that everybody
// knows who it is.
#pragma once

namespace cpudist::backends {

class PairwiseMessages {
 public:
  virtual ~PairwiseMessages() = default;
  // From now on failures are of pairs. Before the first message, in a group without collectives.
  virtual void fail_pairwise() = 0;
  // Ends the messages with this rank, those to come too. Any thread.
  virtual void give_up(int peer) = 0;
};

}  // namespace cpudist::backends
