// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one class
//
// What comes before what: what works beside it, interrupted operations, locks; then the work
// itself.
#include "client/param_set.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "client/push/packing.h"
#include "client/rounds/join_with.h"
#include "client/rounds/push.h"
#include "client/values/load.h"
#include "client/values/pull.h"
#include "client/values/tables.h"
#include "client/values/transfer.h"

namespace cpudist::client {

ParamSet::ParamSet(Shared& shared, uint32_t id, const wire::ParamSetLayout& layout,
                   const Membership& membership, const CacheLimits& limits)
    : shared_(shared),
      state_(std::make_shared<SetState>(id, layout, shared.owners, shared.server_count(), limits)),
      prefetcher_(std::make_shared<Prefetcher>(*state_, shared.session, shared.pool)),
      membership_(membership) {}

void ParamSet::check_open() const {
  if (!state_->closed) return;
  throw Error(ErrorCode::kClosed,
              "parameter set " + std::to_string(id()) + " is not open on this client");
}

void ParamSet::forget_rows() {
  prefetcher_->drop_all();
  state_->invalidate_tables();
}

// ---- opening and closing ------------------------------------------------------------------------

void ParamSet::accept_open(std::span<const RequestPtr> replies) {
  state_->round = agreed_round(membership_, replies);
  std::vector<bool> takers;
  for (const RequestPtr& request : replies) {
    takers.push_back(!rounds_gradients(state_->layout) &&
                     wire::decode_round_reply(request->reply.payload.bytes()).takes_parts);
  }
  state_->early.set_takers(std::move(takers));
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
      [set = state_, prefetcher = prefetcher_,
       &membership = membership_](std::span<const RequestPtr> replies) {
        set->round = agreed_round(membership, replies);
        set->member = true;
        prefetcher->drop_all();
        set->invalidate_tables();
      });
}

void ParamSet::forget_weights() {
  for (const auto& table : state_->tables) shared_.huge_pages.forget(table->weight());
}

void ParamSet::close() {
  forget_weights();  // before anything that may be interrupted: they may go after it
  // One that was interrupted may have ended since, in another call on the client.
  if (!(closing_ && state_->closed)) drain();
  {
    const Shared::Lock lock = shared_.sequence();
    if (!(closing_ && state_->closed)) {
      check_open();
      prefetcher_->drop_all();
      state_->early.drop(shared_.session);
      closing_ = true;
      shared_.run_all(
          wire::FrameKind::kClose, id(), [] { return Buffer(); },
          [&shared = shared_, set = state_](std::span<const RequestPtr>) {
            set->closed = true;
            shared.remove(set->id);
          });
    }
    closing_ = false;
  }
  stop_background();
  {
    const std::lock_guard lock(shared_.sequenced());
    state_->release();
    ClientStats stats;
    stats.cache_dropped = state_->cache_budget.dropped_rows.exchange(0);
    stats.residues_dropped = state_->residues_dropped.exchange(0);
    stats.early_bytes = state_->early.sent_bytes();
    stats.early_changed_bytes = state_->early.changed_bytes();
    shared_.count_closed(stats);
  }
  shared_.release_closed();
}

// ---- values -------------------------------------------------------------------------------------

void ParamSet::bind_table(uint32_t table, float* weight) {
  check_open();
  TableCache& cache = state_->table(table);
  if (cache.remote()) {
    throw Error(ErrorCode::kInvalidArgument,
                "table '" + cache.spec().name +
                    "' is remote: its rows have no weight here to go to; use lookup()");
  }
  prefetcher_->drop_all();  // what is held is in the old one
  const std::lock_guard lock(cache.mutex);
  const float* const before = cache.weight();
  cache.bind(weight);
  if (weight == before) return;
  shared_.huge_pages.forget(before);
  // Rows are written and read at random; a page walk per row costs more than the row.
  const wire::TableSpec& spec = cache.spec();
  shared_.huge_pages.prefer(weight, spec.rows * spec.dim * sizeof(float));
}

void ParamSet::store_table(uint32_t table, std::span<const int64_t> keys, const float* weights,
                           const float* state, const uint32_t* counts, uint64_t step) {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  state_->check_reads_values();
  client::store_table(shared_, *state_, {table, keys, weights, state, counts}, step);
  prefetcher_->drop_all();
  TableCache& cache = state_->table(table);
  const std::lock_guard cache_lock(cache.mutex);
  cache.note_stored();
}

void ParamSet::store_run(const RunValues& rows, uint64_t step) {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  state_->check_reads_values();
  client::store_run(shared_, *state_, rows, step);
  prefetcher_->drop_all();
  TableCache& cache = state_->table(rows.table);
  const std::lock_guard cache_lock(cache.mutex);
  cache.invalidate();
}

void ParamSet::fetch_run(const RunPlaces& rows, uint64_t* step) {
  drain();
  shared_.settle();
  check_open();
  *step = client::fetch_run(shared_, *state_, rows);
}

void ParamSet::store_parameter(uint32_t parameter, const void* weights, const void* state,
                               uint64_t step, const void* average) {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  state_->check_reads_values();
  client::store_parameter(shared_, *state_, parameter, weights, state, step, average);
}

void ParamSet::load(uint32_t server, const wire::Load& what) {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  state_->check_reads_values();
  client::load(shared_, *state_, server, what);
  prefetcher_->drop_all();
  state_->invalidate_tables();
}

wire::TableCounts ParamSet::table_counts(uint32_t table) {
  check_open();
  return client::table_counts(shared_, *state_, table);
}

uint64_t ParamSet::shrink(uint32_t table) {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  return client::shrink(shared_, *state_, table);
}

void ParamSet::fetch_parameter(uint32_t parameter, void* weights, void* state, uint64_t* step) {
  drain();
  shared_.settle();
  check_open();
  *step = client::fetch_parameter(shared_, *state_, parameter, weights, state);
}

// ---- pulls --------------------------------------------------------------------------------------

uint64_t ParamSet::pull(uint32_t table, const void* ids, uint64_t count, bool ids_are_int32) {
  shared_.settle();
  check_open();
  return look_up(shared_, *state_, *prefetcher_, {table, ids, count, ids_are_int32});
}

std::vector<uint64_t> ParamSet::pull_together(std::span<const GuessedIds> guesses) {
  check_open();
  // What an interrupted step leaves is for the next call that may wait.
  if (shared_.has_unfinished()) return std::vector<uint64_t>(guesses.size());
  return client::pull_together(shared_, *state_, *prefetcher_, guesses);
}

uint64_t ParamSet::lookup(uint32_t table, const void* ids, uint64_t count, bool ids_are_int32,
                          float* out, bool keep) {
  shared_.settle();
  check_open();
  return look_up_into(shared_, *state_, *prefetcher_, {table, ids, count, ids_are_int32}, out,
                      keep);
}

void ParamSet::read_rows(uint32_t table, std::span<const int64_t> keys) {
  shared_.settle();
  check_open();
  client::read_rows(shared_, *state_, table, keys);
}

void ParamSet::fetch_rows(uint32_t table, std::span<const int64_t> keys, float* out) {
  shared_.settle();
  check_open();
  client::fetch_rows(shared_, *state_, table, keys, out);
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

void ParamSet::read_averages(bool averages) {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  if (state_->layout.average_decay == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "averages: parameter set " + std::to_string(id()) + " was opened without any");
  }
  prefetcher_->drop_all();
  state_->reads_averages = averages;
  state_->invalidate_tables();
  state_->take_read();  // of what is to be pulled again
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
  if (!state_->member || state_->reads_averages || shared_.has_unfinished()) return 0;
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

uint64_t ParamSet::push_early(std::span<const ParameterGradient> gradients) {
  check_open();
  // What an interrupted step leaves is for the next call that may wait.
  if (!state_->member || shared_.has_unfinished()) return 0;
  return state_->early.send(shared_.session, id(), state_->layout, state_->parameter_blocks,
                            state_->round, gradients, shared_.pool);
}

bool ParamSet::may_push_early() const {
  check_open();
  return state_->early.has_takers(shared_.session);
}

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
    const auto pushes = sent.last(std::min<size_t>(sent.size(), shared_.server_count()));
    if (shared_.session.refused(sent)) state_->refused.assign(pushes.begin(), pushes.end());
    throw;
  }
  return state_->dense_version(0).round - 1;
}

// ---- cuts of snapshots --------------------------------------------------------------------------

CutAnswer ParamSet::send_cut(const wire::Cut& cut) {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  // An interrupt may leave the request to the next call, which knows nothing of this one.
  const auto answer = std::make_shared<CutAnswer>();
  shared_.run_all(
      wire::FrameKind::kCut, id(), [cut] { return encode(cut); },
      [answer, state = state_, number = cut.number](std::span<const RequestPtr> replies) {
        *answer = join_answers(number, replies);
        // The reply to the next push says when to mark again.
        if (answer->taken_back) state->cut_wanted = 0;
      });
  return *answer;
}

void ParamSet::take_marker_back(uint64_t number) {
  check_open();
  client::take_marker_back(shared_.session, id(), number);
}

CutAnswer ParamSet::mark_cut(uint64_t number, const std::string& name, uint64_t wait_ms,
                             uint64_t base) {
  return send_cut(make_cut(number, name, wait_ms, wire::CutStep::kMark, base));
}

std::string ParamSet::announce_cut(uint64_t number, const std::string& name, uint64_t wait_ms) {
  return send_cut(make_cut(number, name, wait_ms, wire::CutStep::kAnnounce)).reason;
}

void ParamSet::abandon_cut(uint64_t number) {
  const wire::Cut cut = make_cut(number, {}, 0, wire::CutStep::kAbandon);
  const Shared::Lock lock = shared_.sequence();  // of no step: behind no queued push
  check_open();
  shared_.run_all(
      wire::FrameKind::kCut, id(), [cut] { return encode(cut); },
      [](std::span<const RequestPtr>) {});
}

uint64_t ParamSet::cut_wanted() const {
  check_open();
  return state_->cut_wanted;
}

Residues* ParamSet::residues() {
  check_open();
  const bool here = state_->layout.mode != wire::UpdateMode::kOnArrival;
  return here ? state_->residues.get() : nullptr;
}

wire::CutStatus ParamSet::cut_status(uint32_t server, uint64_t number, const std::string& token) {
  check_open();
  if (server >= shared_.server_count()) {
    throw Error(ErrorCode::kInvalidArgument, "server " + std::to_string(server) +
                                                 ", but there are " +
                                                 std::to_string(shared_.server_count()));
  }
  const RequestPtr request = shared_.session.send(server, wire::FrameKind::kCutStatus, id(),
                                                  encode(wire::CutQuery{number, token}));
  shared_.session.wait({&request, 1}, Session::Caller::kBackground);
  return wire::decode_cut_status(request->reply.payload.bytes());
}

// ---- what works beside it -----------------------------------------------------------------------

std::shared_ptr<Background> ParamSet::background() const {
  const std::lock_guard lock(mutex_);
  return background_;
}

bool ParamSet::has_background() const { return background() != nullptr; }

void ParamSet::attach(std::shared_ptr<Background> background) {
  check_open();
  const std::lock_guard lock(mutex_);
  if (background_) {
    throw Error(ErrorCode::kInvalidArgument,
                "parameter set " + std::to_string(id()) + " has what sends for it already");
  }
  background_ = std::move(background);
}

void ParamSet::drain() {
  check_open();
  drain_background();
}

void ParamSet::drain_background() {
  if (const auto running = background()) running->drain();
}

void ParamSet::stop_background() {
  const auto running = background();
  if (!running) return;
  running->stop();
  const std::lock_guard lock(mutex_);
  if (!background_) return;  // somebody else was faster
  ClientStats stats;
  running->add_stats(&stats);
  shared_.count_closed(stats);
  background_.reset();
}

void ParamSet::add_stats(ClientStats* stats) const {
  if (const auto running = background()) running->add_stats(stats);
  stats->cache_dropped += state_->cache_budget.dropped_rows;
  stats->residues_dropped += state_->residues_dropped;
  stats->early_bytes += state_->early.sent_bytes();
  stats->early_changed_bytes += state_->early.changed_bytes();
}

// ---- membership ---------------------------------------------------------------------------------

void ParamSet::join_sequenced() { shared_.drive(membership_.make_join(shared_, state_)); }

void ParamSet::join() {
  const Shared::Lock lock = shared_.sequence();
  check_open();
  if (state_->member) return;
  join_sequenced();
  forget_rows();
  state_->take_read();  // of rows that are to be pulled again
}

void ParamSet::join_with(ParamSet& last) {
  const Shared::Lock lock = shared_.sequence();
  check_open();
  last.check_open();
  if (state_->member && last.state_->member) return;  // by one that an interrupt had left
  if (&shared_ != &last.shared_ || state_->member || last.state_->member || !last.counts_rounds()) {
    throw Error(ErrorCode::kInvalidArgument,
                "join_with: expected two sets of one client that this trainer has left, the second "
                "updated in rounds");
  }
  shared_.drive(make_join_with(shared_, {membership_, state_}, {last.membership_, last.state_}));
  if (state_->layout.max_staleness == wire::kAnyStaleness) return;
  forget_rows();
  state_->take_read();
}

void ParamSet::leave() {
  drain();
  const Shared::Lock lock = shared_.sequence();
  check_open();
  if (!state_->member) return;
  prefetcher_->drop_all();
  state_->early.drop(shared_.session);
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
  state_->early.drop(shared_.session);  // servers have forgotten it
  // What was read before may be older than a bound on staleness allows: join() comes first.
  state_->member = state_->layout.max_staleness == wire::kAnyStaleness;
  forget_rows();
}

}  // namespace cpudist::client
