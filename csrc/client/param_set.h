// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A parameter set as its trainer uses it: pulls, steps, values to store and to fetch, membership.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "client/prefetch.h"
#include "client/push/queue.h"
#include "client/push/step.h"
#include "client/shared.h"
#include "client/state.h"

namespace cpudist::client {

// Made by Client::open, which holds it until it is closed. It may be held longer than that, by
// others too, but not be called after the end of its client.
//
// Ownership: the set has its queue and its state; the queue and operations under way hold the state
// alone, so nothing holds itself.
//
// Thread safety: any thread; requests that change a server (push, leave, join, store) are
// serialised by the client. All throw kClosed once the set is closed.
//
// A wait that ends with kInterrupted or kTimeout leaves its request in flight; the next call on the
// client finishes it first, so that nothing is lost or applied twice. No pointer given to an
// earlier call is used then, except those of bind_table.
class ParamSet {
 public:
  ParamSet(Shared& shared, uint32_t id, const wire::ParamSetLayout& layout);
  ParamSet(const ParamSet&) = delete;
  ParamSet& operator=(const ParamSet&) = delete;

  uint32_t id() const { return state_->id; }
  // Whether the servers had all values when it was opened: trainer 0 must not store them again.
  bool holds_values() const;
  // Where pulled rows go: `weight` is [rows, dim] and stays valid until close.
  void bind_table(uint32_t table, float* weight);
  void store_table(uint32_t table, std::span<const int64_t> keys, const float* weights,
                   const float* state, const uint32_t* counts, uint64_t step);
  // `state`: state_elements of each block of the parameter, block by block, or null.
  void store_parameter(uint32_t parameter, const void* weights, const void* state, uint64_t step);
  // Trainer 0 after its last store; the others wait here for it (round deadline).
  void ready();
  void fetch_table(uint32_t table, std::span<const int64_t> keys, float* weights, float* state,
                   uint32_t* counts, uint64_t* step);
  // `state` as in store_parameter; either may be null.
  void fetch_parameter(uint32_t parameter, void* weights, void* state, uint64_t* step);

  // Makes the rows of `ids` current in the bound weight: sends one request per server for those not
  // pulled since the last step of this parameter set. int32 or int64 ids. Throws kRowOutOfRange.
  void pull(uint32_t table, const void* ids, uint64_t count, bool ids_are_int32);
  void pull_all_rows();  // in chunks
  // Asks for the rows of a batch to come, one request per server, and returns its number at once.
  // Lookups then find them: in rounds with the values of the last one. A batch goes with the step
  // that used all its rows, or if `managed`, with the step after use_prefetched(its number). Does
  // nothing, and returns 0, while this trainer takes no part. Throws kRowOutOfRange.
  uint64_t prefetch(std::span<const ComingIds> ids, bool managed);
  void use_prefetched(uint64_t number);
  void drop_prefetched();
  // `weights`: base pointer of every dense parameter, in order.
  void pull_dense(std::span<void* const> weights);

  // One step: joins first if this trainer has left; returns when the round is applied on every
  // server and the updated blocks are written to `weight`. Throws kUnpulledRow before anything is
  // sent. Pulled rows count as stale afterwards. Returns the number of the update: of the round, or
  // with several groups of trainers among the updates of server 0 by all of them.
  uint64_t push(const StepPush& step);

  // ---- updates on arrival ----
  void start_queue(const QueueOptions& options);
  // One step: packs the gradient, queues it and takes the newest dense values in that have come.
  // Waits for room in the queue; with max_staleness until it is applied. Throws what an earlier
  // push failed with; kUnpulledRow before anything is queued; after kInterrupted and kTimeout it is
  // queued. Returns the version of server 0's values.
  uint64_t enqueue(const StepPush& step);
  void drain();  // until everything queued is applied
  // Steps of all trainers, as far as server 0 has told, and those of this one that it has not
  // answered yet. A merged push counts each of its steps.
  uint64_t known_steps();
  // Takes part again; rows and dense values of before are to be pulled anew. With a bound on
  // staleness also needed after a barrier, and before the next gradient is computed.
  void join();

  void leave();
  bool is_member() const;
  void close();

  // ---- for what is built on a set ----
  void check_open() const;  // throws kClosed
  Shared& shared() const { return shared_; }
  const std::shared_ptr<SetState>& state() const { return state_; }
  std::shared_ptr<PushQueue> queue() const;  // null: it has none
  // One taker has the answers of the queue, beside enqueue. False: there is one.
  bool claim_answers() { return !answers_claimed_.exchange(true); }

 private:
  friend class Client;
  friend class Shared;
  void accept_open(std::span<const RequestPtr> replies);
  void accept_barrier(uint64_t round);
  void drain_queue();
  void stop_queue();  // without locks: its thread may wait for one
  void add_stats(ClientStats* stats) const;
  void join_sequenced();
  void forget_rows();  // rows that are here or on their way are not to be used any more
  void take_arrived(PushQueue& queue, std::span<void* const> weights);

  Shared& shared_;
  const std::shared_ptr<SetState> state_;
  const std::shared_ptr<Prefetcher> prefetcher_;
  std::atomic<bool> answers_claimed_{false};
  mutable std::mutex mutex_;  // of `queue_`
  std::shared_ptr<PushQueue> queue_;
};

}  // namespace cpudist::client
