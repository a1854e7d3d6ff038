// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A step whose push is answered when its round is applied.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/prefetch.h"
#include "client/push/step.h"
#include "client/shared.h"
#include "client/state.h"

namespace cpudist::client {

// One stage, or with a norm to clip by two: the servers tell the norms of their parts, then are
// told the whole one.
//
// The caller's memory: gradients are read in send() of the first stage, which runs within the call
// that made the operation; weights are written by receive() of the last one, unless an interrupt
// has ended that call, of which detach() tells: nothing names them afterwards.
class RoundPush final : public Operation {
 public:
  // `step` was prepared; `read`: per server, what its gradient was computed on.
  RoundPush(Shared& shared, std::shared_ptr<SetState> set, std::shared_ptr<Prefetcher> prefetcher,
            const StepPush& step, std::vector<wire::Version> read);

 private:
  size_t stage_count() const override { return clips_norm_ ? 2 : 1; }
  std::vector<RequestPtr> send(size_t stage) override;
  void receive(size_t stage, std::span<const RequestPtr> replies) override;
  void detach() override;

  std::vector<RequestPtr> send_push();
  void add_norms(std::span<const RequestPtr> replies);
  std::vector<RequestPtr> send_commit();
  void finish_round(std::span<const RequestPtr> replies);

  Shared& shared_;
  const std::shared_ptr<SetState> set_;
  const std::shared_ptr<Prefetcher> prefetcher_;
  const bool clips_norm_;
  const uint64_t samples_;
  const std::vector<wire::Version> read_;
  const StepPush* step_;            // null once it is sent
  std::span<void* const> weights_;  // where dense values go
  bool detached_ = false;
  std::vector<double> squared_norms_;  // one, or of every tensor
};

// Throws kClosed if the last push was refused by some servers and taken by others.
void check_whole(Shared& shared, SetState& set);

}  // namespace cpudist::client
