// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The steps of a trainer whose pushes are applied as they come: each is queued, and training goes
// on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "client/arrivals/queue.h"
#include "client/param_set.h"
#include "client/push/step.h"

namespace cpudist::client {

// Starts what sends pushes beside the calls on `set`, once for a set. Throws kInvalidArgument for a
// set that is updated by its trainers' own calls, has a queue, or cannot have these options.
std::shared_ptr<PushQueue> start_queue(ParamSet& set, const QueueOptions& options);

// It holds its parameter set, which knows nothing of it; all throw kClosed once that is closed.
//
// Thread safety: as ParamSet; steps from one thread at a time.
class AsyncPushes {
 public:
  AsyncPushes(std::shared_ptr<ParamSet> set, const QueueOptions& options);
  AsyncPushes(const AsyncPushes&) = delete;
  AsyncPushes& operator=(const AsyncPushes&) = delete;

  // One step: packs the gradient, queues it and takes the newest dense values in that have come.
  // Waits for room in the queue; with max_staleness until it is applied. Throws what an earlier
  // push failed with; kUnpulledRow before anything is queued; after kInterrupted and kTimeout it is
  // queued. Returns the version of server 0's values.
  uint64_t enqueue(const StepPush& step);
  // Steps of all trainers, as far as server 0 has told, and those of this one that it has not
  // answered yet. A merged push counts each of its steps.
  uint64_t known_steps() const;
  // See PushQueue; also of a set that is closed.
  uint64_t added() const { return queue_->added(); }
  Unapplied end(std::span<const uint64_t> carried_out) { return queue_->end(carried_out); }
  // Puts a marker behind the pushes of all steps so far and returns; a name from the trainer that
  // asks for the cut, else none. `base`: see wire::Cut. Throws what an earlier push failed with.
  void mark_cut(uint64_t number, const std::string& name, uint64_t wait_ms, uint64_t base = 0,
                uint64_t hold_ms = 0);
  // What a marker was answered with, once, the oldest first; nothing before. Throws what it failed
  // with.
  std::optional<CutAnswer> cut_answer();

 private:
  QueuedPush pack(const StepPush& step);
  void take_arrived(std::span<void* const> weights);

  const std::shared_ptr<ParamSet> owner_;
  SetState& set_;  // of the owner
  const std::shared_ptr<PushQueue> queue_;
};

}  // namespace cpudist::client
