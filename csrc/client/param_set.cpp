// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What comes before what: the queue, interrupted operations, locks; then the work itself.
#include "client/param_set.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "client/membership.h"
#include "client/pull.h"
#include "client/push/coding.h"
#include "client/push/packing.h"
#include "client/push/round.h"
#include "client/transfer.h"

namespace cpudist::client {

ParamSet::ParamSet(Shared& shared, uint32_t id, const wire::ParamSetLayout& layout)
    : shared_(shared),
      state_(std::make_shared<SetState>(id, layout, shared.owners, shared.server_count())),
      prefetcher_(std::make_shared<Prefetcher>(*state_, shared.session, shared.pool)) {}

void ParamSet::check_open() const {
  if (!state_->closed) return;
  throw Error(ErrorCode::kClosed,
              "parameter set " + std::to_string(id()) + " is not open on this client");
}

std::shared_ptr<PushQueue> ParamSet::queue() const {
  const std::lock_guard lock(mutex_);
  return queue_;
}

void ParamSet::forget_rows() {
  prefetcher_->drop_all();
  state_->invalidate_tables();
}

// ---- opening and closing ------------------------------------------------------------------------

void ParamSet::accept_open(std::span<const RequestPtr> replies) {
  state_->round = agreed_round(*state_, replies);
  state_->ready = std::all_of(replies.begin(), replies.end(), [](const RequestPtr& request) {
    return wire::decode_round_reply(request->reply.payload.bytes()).ready;
  });
}

bool ParamSet::holds_values() const {
  check_open();
  return state_->ready;
}

void ParamSet::ready() {
  const Shared::Lock lock = shared_.sequence();
  check_open();
  shared_.run_all(
      wire::FrameKind::kReady, id(), [] { return Buffer(); },
      [set = state_, prefetcher = prefetcher_](std::span<const RequestPtr> replies) {
        set->round = agreed_round(*set, replies);
        set->member = true;
        prefetcher->drop_all();
        set->invalidate_tables();
      });
}

void ParamSet::close() {
  drain();
  {
    const Shared::Lock lock = shared_.sequence();
    check_open();
    prefetcher_->drop_all();
    shared_.run_all(
        wire::FrameKind::kClose, id(), [] { return Buffer(); },
        [&shared = shared_, set = state_](std::span<const RequestPtr>) {
          set->closed = true;
          shared.remove(set->id);
        });
  }
  stop_queue();
  shared_.release_closed();
}

// ---- values -------------------------------------------------------------------------------------

void ParamSet::bind_table(uint32_t table, float* weight) {
  check_open();
  TableCache& cache = state_->table(table);
  prefetcher_->drop_all();  // what is held is in the old one
  const std::lock_guard lock(cache.mutex);
  cache.bind(weight);
}

void ParamSet::store_table(uint32_t table, std::span<const int64_t> keys, const float* weights,
                           const float* state, const uint32_t* counts, uint64_t step) {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  client::store_table(shared_, *state_, {table, keys, weights, state, counts}, step);
  prefetcher_->drop_all();
  TableCache& cache = state_->table(table);
  const std::lock_guard cache_lock(cache.mutex);
  cache.invalidate();
}

void ParamSet::store_parameter(uint32_t parameter, const void* weights, const void* state,
                               uint64_t step) {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  client::store_parameter(shared_, *state_, parameter, weights, state, step);
}

void ParamSet::fetch_table(uint32_t table, std::span<const int64_t> keys, float* weights,
                           float* state, uint32_t* counts, uint64_t* step) {
  drain();
  shared_.settle();
  check_open();
  *step = client::fetch_table(shared_, *state_, table, keys, weights, state, counts);
}

void ParamSet::fetch_parameter(uint32_t parameter, void* weights, void* state, uint64_t* step) {
  drain();
  shared_.settle();
  check_open();
  *step = client::fetch_parameter(shared_, *state_, parameter, weights, state);
}

// ---- pulls --------------------------------------------------------------------------------------

void ParamSet::pull(uint32_t table, const void* ids, uint64_t count, bool ids_are_int32) {
  shared_.settle();
  check_open();
  look_up(shared_, *state_, *prefetcher_, {table, ids, count, ids_are_int32});
}

void ParamSet::pull_all_rows() {
  shared_.settle();
  check_open();
  prefetcher_->drop_all();
  client::pull_all_rows(shared_, *state_);
}

void ParamSet::pull_dense(std::span<void* const> weights) {
  shared_.settle();
  check_open();
  client::pull_dense(shared_, *state_, weights);
}

uint64_t ParamSet::prefetch(std::span<const ComingIds> ids, bool managed) {
  check_open();
  for (const ComingIds& one : ids) check_bound(state_->table(one.table));
  if (state_->layout.max_staleness != wire::kAnyStaleness) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "prefetch: rows read before a step would be older at the next one than max_staleness "
        "promises to the servers. Train without prefetch, or without max_staleness");
  }
  // What an interrupted step leaves is for the next call that may wait.
  if (!state_->member || shared_.has_unfinished()) return 0;
  uint64_t rows = 0;
  const uint64_t number = prefetcher_->request(ids, managed, &rows);
  shared_.rows_prefetched += rows;
  return number;
}

void ParamSet::use_prefetched(uint64_t number) {
  check_open();
  prefetcher_->use(number);
}

void ParamSet::drop_prefetched() {
  check_open();
  prefetcher_->drop_all();
}

// ---- a step in rounds ---------------------------------------------------------------------------

uint64_t ParamSet::push(const StepPush& step) {
  const Shared::Lock lock = shared_.sequence();
  check_open();
  check_whole(shared_, *state_);
  if (state_->dense_stale) {
    throw Error(ErrorCode::kInvalidArgument,
                "step: an earlier step was interrupted and its round was applied since; this "
                "gradient was computed on values from before it. Call opt.flush(), then compute "
                "the gradient again");
  }
  prepare_push(*state_, step);
  prefetcher_->prepare();
  std::vector<wire::Version> read = state_->take_read();
  if (!state_->member) join_sequenced();
  const auto round =
      std::make_shared<RoundPush>(shared_, state_, prefetcher_, step, std::move(read));
  try {
    shared_.drive(round);
  } catch (const Error&) {
    const auto sent = round->in_flight();
    if (shared_.session.refused(sent)) state_->refused.assign(sent.begin(), sent.end());
    throw;
  }
  return state_->dense_version(0).round - 1;
}

// ---- updates on arrival -------------------------------------------------------------------------

void ParamSet::start_queue(const QueueOptions& options) {
  check_open();
  const wire::ParamSetLayout& layout = state_->layout;
  const std::lock_guard lock(mutex_);
  const bool queues = layout.mode == wire::UpdateMode::kOnArrival || layout.exchanges_deltas;
  if (!queues || queue_) {
    throw Error(ErrorCode::kInvalidArgument, "parameter set " + std::to_string(id()) +
                                                 " is updated in rounds, or has its queue already");
  }
  check_options(options, layout);
  queue_ = std::make_shared<PushQueue>(shared_.session, shared_.sequenced(), state_, options,
                                       shared_.pool);
}

uint64_t ParamSet::enqueue(const StepPush& step) {
  shared_.settle();
  check_open();
  SetState& set = *state_;
  const auto queue = this->queue();
  if (!queue) {
    throw Error(ErrorCode::kInvalidArgument,
                "parameter set " + std::to_string(id()) + " has no queue: call start_queue first");
  }
  queue->throw_failure();
  const bool bounded = set.layout.max_staleness != wire::kAnyStaleness;
  if (!set.member && bounded) {
    throw Error(ErrorCode::kInvalidArgument,
                "step: this trainer has left, and the values of this gradient are older than "
                "max_staleness may allow. Call opt.join() before the forward of the next step");
  }
  prepare_push(set, step);
  prefetcher_->prepare();
  QueuedPush push;
  push.read = set.take_read();
  if (!set.member) join();
  push.configs = step.configs;
  push.samples = step.samples;
  const bool ordered = orders_rows(set, shared_.session, step.clip_norm > 0.0);
  push.payloads =
      pack_push(set, step, shared_.pool, prefetcher_.get(), queue->next_wants_dense(), ordered);
  clip_push(set, push.payloads, step.clip_value, step.clip_norm);
  shared_.rows_pushed += packed_rows(set);
  ++set.step;  // before the rows are stale: a row read meanwhile is read again for this step
  set.invalidate_tables();
  prefetcher_->finish_push();
  queue->add(std::move(push));
  if (bounded) queue->drain();
  take_arrived(*queue, step.weights);
  return std::max(set.dense_version(0).round, queue->version());
}

void ParamSet::take_arrived(PushQueue& queue, std::span<void* const> weights) {
  const std::vector<wire::Frame> replies = queue.take_arrived();
  for (uint32_t s = 0; s < replies.size(); ++s) {
    if (replies[s].payload.empty()) continue;
    // Values pulled meanwhile may be newer.
    const wire::Version version = unpack_dense(*state_, replies[s], {});
    if (version.round < state_->dense_version(s).round) continue;
    unpack_dense(*state_, replies[s], weights);
    state_->note_dense(s, version);
  }
}

uint64_t ParamSet::known_steps() {
  check_open();
  const uint64_t told = state_->dense_version(0).steps;
  const auto queue = this->queue();
  return queue ? queue->steps(told) : told;
}

void ParamSet::drain() {
  check_open();
  drain_queue();
}

void ParamSet::drain_queue() {
  if (const auto queue = this->queue()) queue->drain();
}

void ParamSet::stop_queue() {
  const auto queue = this->queue();
  if (!queue) return;
  queue->stop();
  const std::lock_guard lock(mutex_);
  if (!queue_) return;  // somebody else was faster
  ClientStats stats;
  queue->add_stats(&stats);
  shared_.count_closed(stats);
  queue_.reset();
}

void ParamSet::add_stats(ClientStats* stats) const {
  if (const auto queue = this->queue()) queue->add_stats(stats);
}

// ---- membership ---------------------------------------------------------------------------------

void ParamSet::join_sequenced() { shared_.drive(make_join(shared_, state_)); }

void ParamSet::join() {
  const Shared::Lock lock = shared_.sequence();
  check_open();
  if (state_->member) return;
  join_sequenced();
  forget_rows();
  state_->take_read();  // of rows that are to be pulled again
}

void ParamSet::leave() {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  if (!state_->member) return;
  prefetcher_->drop_all();
  shared_.run_all(
      wire::FrameKind::kLeave, id(), [] { return Buffer(); },
      [set = state_](std::span<const RequestPtr>) { set->member = false; });
}

bool ParamSet::is_member() const {
  check_open();
  return state_->member;
}

void ParamSet::accept_barrier(uint64_t round) {
  state_->round = round;
  // What was read before may be older than a bound on staleness allows: join() comes first.
  state_->member = state_->layout.max_staleness == wire::kAnyStaleness;
  forget_rows();
}

}  // namespace cpudist::client
