// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Steps of a parameter set that is updated on arrival, as the training thread takes them.
#include <algorithm>
#include <bit>

#include "client/client_impl.h"
#include "client/geo/exchange.h"

namespace cpudist::client {

void Client::start_queue(uint32_t param_set, const QueueOptions& options) {
  const ClientSetPtr set = impl_->find(param_set);
  const std::lock_guard lock(impl_->sets_mutex);
  const bool queues =
      set->layout.mode == wire::UpdateMode::kOnArrival || set->layout.exchanges_deltas;
  if (!queues || set->queue) {
    throw Error(ErrorCode::kInvalidArgument, "parameter set " + std::to_string(param_set) +
                                                 " is updated in rounds, or has its queue already");
  }
  if (options.mean.size() != set->layout.configs.size()) {
    throw Error(ErrorCode::kInvalidArgument, "start_queue: one merge rule per parameter group");
  }
  if (options.size == 0 || options.max_merge == 0 || options.pull_every == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "queue size, merge count and pull interval must be at least 1");
  }
  if (set->layout.max_staleness != wire::kAnyStaleness && options.pull_every != 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "start_queue: with a bound on staleness every push brings dense values back");
  }
  if (set->layout.compensation.kind != wire::Compensation::kNone && options.max_merge != 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "start_queue: merged gradients were computed on different values, so delay "
                "compensation needs max_merge = 1");
  }
  set->queue = std::make_shared<PushQueue>(impl_->session, impl_->sequenced_mutex, set, options,
                                           impl_->pool);
}

uint64_t Client::enqueue(uint32_t param_set, const StepPush& step) {
  Impl* impl = impl_.get();
  impl->settle();
  const ClientSetPtr set = impl->find(param_set);
  const auto queue = impl->queue_of(*set);
  if (!queue) {
    throw Error(ErrorCode::kInvalidArgument, "parameter set " + std::to_string(set->id) +
                                                 " has no queue: call start_queue first");
  }
  queue->throw_failure();
  const bool bounded = set->layout.max_staleness != wire::kAnyStaleness;
  if (!set->member && bounded) {
    throw Error(ErrorCode::kInvalidArgument,
                "step: this trainer has left, and the values of this gradient are older than "
                "max_staleness may allow. Call opt.join() before the forward of the next step");
  }
  prepare_push(*set, step);
  set->prefetcher.prepare(*set);
  QueuedPush push;
  push.read = set->take_read();
  if (!set->member) join(param_set);
  push.configs = step.configs;
  push.samples = step.samples;
  const bool ordered = orders_rows(*set, impl->session, step.clip_norm > 0.0);
  push.payloads = pack_push(*set, step, impl->pool, queue->next_wants_dense(), ordered);
  clip_push(*set, push.payloads, step.clip_value, step.clip_norm);
  impl->rows_pushed += packed_rows(*set);
  ++set->step;  // before the rows are stale: a row read meanwhile is read again for this step
  set->invalidate_tables();
  set->prefetcher.finish_push(*set, impl->session);
  queue->add(std::move(push));
  if (bounded) queue->drain();
  impl->take_arrived(*set, *queue, step.weights);
  return std::max(set->dense_version(0).round, queue->version());
}

void Client::join(uint32_t param_set) {
  const std::lock_guard lock(impl_->sequenced_mutex);
  impl_->finish_unfinished();
  const ClientSetPtr set = impl_->find(param_set);
  if (set->member) return;
  impl_->join(set);
  impl_->forget_rows(*set);
  set->take_read();  // of rows that are to be pulled again
}

uint64_t Client::known_steps(uint32_t param_set) {
  const ClientSetPtr set = impl_->find(param_set);
  const uint64_t told = set->dense_version(0).steps;
  const auto queue = impl_->queue_of(*set);
  return queue ? queue->steps(told) : told;
}

void Client::drain(uint32_t param_set) {
  const auto queue = impl_->queue_of(*impl_->find(param_set));
  if (queue) queue->drain();
}

std::shared_ptr<PushQueue> Client::Impl::queue_of(const ClientSet& set) {
  const std::lock_guard lock(sets_mutex);
  return set.queue;
}

void Client::Impl::take_arrived(ClientSet& set, PushQueue& queue, std::span<void* const> weights) {
  const std::vector<wire::Frame> replies = queue.take_arrived();
  for (uint32_t s = 0; s < replies.size(); ++s) {
    if (replies[s].payload.empty()) continue;
    // Values pulled meanwhile may be newer.
    const wire::Version version = dense_version_of(set, replies[s]);
    if (version.round < set.dense_version(s).round) continue;
    unpack_dense(set, replies[s], weights);
    set.note_dense(s, version);
  }
}

void Client::Impl::drain_queues() {
  for (const auto& queue : queues()) queue->drain();
}

void Client::Impl::stop_queues() {
  for (const auto& queue : queues()) queue->stop();
  const std::lock_guard lock(sets_mutex);
  for (const auto& [id, set] : sets) {
    set->exchange.reset();
    set->queue.reset();
  }
}

std::vector<std::shared_ptr<PushQueue>> Client::Impl::queues() {
  const std::lock_guard lock(sets_mutex);
  std::vector<std::shared_ptr<PushQueue>> found;
  for (const auto& [id, set] : sets) {
    if (set->queue) found.push_back(set->queue);
  }
  return found;
}

void Client::Impl::stop_queue(ClientSet& set) {
  const auto queue = queue_of(set);
  if (!queue) return;
  queue->stop();
  const std::lock_guard lock(sets_mutex);
  if (!set.queue) return;  // somebody else was faster
  queue->add_stats(&closed_queues);
  set.exchange.reset();
  set.queue.reset();
}

void Client::Impl::add_queue_stats(ClientStats* stats) {
  const auto open = queues();
  {
    const std::lock_guard lock(sets_mutex);
    stats->wait_s += closed_queues.wait_s;
    stats->staleness.add(closed_queues.staleness);
    stats->staleness.add(group_staleness);
  }
  for (const auto& queue : open) queue->add_stats(stats);
}

void StalenessStats::add(const StalenessStats& other) {
  for (size_t i = 0; i < kBuckets; ++i) {
    steps[i] += other.steps[i];
    samples[i] += other.samples[i];
  }
  pushes += other.pushes;
  merged += other.merged;
  overloaded += other.overloaded;
  steps_sum += other.steps_sum;
  samples_sum += other.samples_sum;
  steps_max = std::max(steps_max, other.steps_max);
  samples_max = std::max(samples_max, other.samples_max);
}

namespace {

// 0, 1, 2-3, 4-7, ...
size_t bucket_of(uint64_t value) { return static_cast<size_t>(std::bit_width(value)); }

}  // namespace

void StalenessStats::count(std::span<const wire::Version> read,
                           std::span<const wire::Version> applied, uint64_t own_samples) {
  wire::Version age;
  for (size_t s = 0; s < applied.size(); ++s) {
    if (read[s].round == wire::kAnyStaleness) continue;
    age.round = std::max(age.round, applied[s].round - 1 - read[s].round);
    age.samples = std::max(age.samples, applied[s].samples - own_samples - read[s].samples);
  }
  ++pushes;
  ++steps[bucket_of(age.round)];
  ++samples[bucket_of(age.samples)];
  steps_sum += age.round;
  samples_sum += age.samples;
  steps_max = std::max(steps_max, age.round);
  samples_max = std::max(samples_max, age.samples);
}

// ---- what a gradient was computed on -----------------------------------------------------------

void ClientSet::note_dense(uint32_t server, wire::Version version) {
  const std::lock_guard lock(read_mutex_);
  dense_read_[server] = version;
}

wire::Version ClientSet::dense_version(uint32_t server) const {
  const std::lock_guard lock(read_mutex_);
  return dense_read_[server];
}

void ClientSet::note_rows(uint32_t server, wire::Version version) {
  const std::lock_guard lock(read_mutex_);
  if (version.round < rows_read_[server].round) rows_read_[server] = version;
}

std::vector<wire::Version> ClientSet::take_read() {
  const std::lock_guard lock(read_mutex_);
  std::vector<wire::Version> oldest = rows_read_;
  for (uint32_t s = 0; s < server_count; ++s) {
    if (!shard_blocks[s].empty() && dense_read_[s].round < oldest[s].round) {
      oldest[s] = dense_read_[s];
    }
    rows_read_[s] = wire::Version(wire::kAnyStaleness);
  }
  return oldest;
}

}  // namespace cpudist::client
