// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/arrivals/pushes.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "client/push/coding.h"
#include "client/push/packing.h"

namespace cpudist::client {

std::shared_ptr<PushQueue> start_queue(ParamSet& set, const QueueOptions& options) {
  set.check_open();
  const wire::ParamSetLayout& layout = set.state()->layout;
  const bool queues = layout.mode == wire::UpdateMode::kOnArrival || layout.exchanges_deltas;
  if (!queues || set.has_background()) {
    throw Error(ErrorCode::kInvalidArgument, "parameter set " + std::to_string(set.id()) +
                                                 " is updated in rounds, or has its queue already");
  }
  check_options(options, layout);
  Shared& shared = set.shared();
  auto queue = std::make_shared<PushQueue>(shared.session, shared.sequenced(), set.state(), options,
                                           shared.pool);
  set.attach(queue);
  return queue;
}

AsyncPushes::AsyncPushes(std::shared_ptr<ParamSet> set, const QueueOptions& options)
    : owner_(std::move(set)), set_(*owner_->state()), queue_(start_queue(*owner_, options)) {}

uint64_t AsyncPushes::enqueue(const StepPush& step) {
  owner_->shared().settle();
  owner_->check_open();
  queue_->throw_failure();
  const bool bounded = set_.layout.max_staleness != wire::kAnyStaleness;
  if (!set_.member && bounded) {
    throw Error(ErrorCode::kInvalidArgument,
                "step: this trainer has left, and the values of this gradient are older than "
                "max_staleness may allow. Call opt.join() before the forward of the next step");
  }
  QueuedPush push = pack(step);
  queue_->add(std::move(push));
  if (bounded) queue_->drain();
  take_arrived(step.weights);
  return std::max(set_.dense_version(0).round, queue_->version());
}

QueuedPush AsyncPushes::pack(const StepPush& step) {
  Shared& shared = owner_->shared();
  Prefetcher& prefetcher = owner_->prefetcher();
  prepare_push(set_, step);
  prefetcher.prepare();
  QueuedPush push;
  push.read = set_.take_read();
  if (!set_.member) owner_->join();
  push.configs = step.configs;
  push.samples = step.samples;
  const bool ordered = orders_rows(set_, shared.session, step.clip_norm > 0.0);
  push.payloads =
      pack_push(set_, step, shared.pool, &prefetcher, queue_->next_wants_dense(), ordered);
  clip_push(set_, push.payloads, step.clip_value, step.clip_norm, step.clip_each);
  shared.rows_pushed += packed_rows(set_);
  ++set_.step;  // before the rows are stale: a row read meanwhile is read again for this step
  set_.invalidate_tables();
  prefetcher.finish_push();
  return push;
}

void AsyncPushes::take_arrived(std::span<void* const> weights) {
  const std::vector<wire::Frame> replies = queue_->take_arrived();
  for (uint32_t s = 0; s < replies.size(); ++s) {
    if (replies[s].payload.empty()) continue;
    // Values pulled meanwhile may be newer.
    const wire::Version version = unpack_dense(set_, replies[s], {});
    if (version.round < set_.dense_version(s).round) continue;
    unpack_dense(set_, replies[s], weights);
    set_.note_dense(s, version);
  }
}

void AsyncPushes::mark_cut(uint64_t number, const std::string& name, uint64_t wait_ms,
                           uint64_t base, uint64_t hold_ms) {
  wire::Cut cut = make_cut(number, name, wait_ms, wire::CutStep::kMark, base);
  owner_->shared().settle();
  owner_->check_open();
  queue_->mark(std::move(cut), hold_ms);
}

std::optional<CutAnswer> AsyncPushes::cut_answer() {
  owner_->check_open();
  return queue_->take_cut_answer();
}

uint64_t AsyncPushes::known_steps() const {
  owner_->check_open();
  return queue_->steps(set_.dense_version(0).steps);
}

}  // namespace cpudist::client
