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
#include <string>
#include <utility>
#include <vector>

#include "client/background.h"
#include "client/membership.h"
#include "client/prefetch.h"
#include "client/push/cut.h"
#include "client/push/step.h"
#include "client/shared.h"
#include "client/state.h"
#include "client/values/guessed_ids.h"
#include "client/values/runs.h"
#include "wire/snapshot/load.h"

namespace cpudist::client {

// Made by Client::open, which holds it until it is closed. It may be held longer than that, by
// others too, but not be called after the end of its client.
//
// Ownership: the set has its state and what works beside it; that and operations under way hold the
// state alone, so nothing holds itself.
//
// Thread safety: any thread; requests that change a server (push, leave, join, store) are
// serialised by the client. All throw kClosed once the set is closed.
//
// A wait that ends with kInterrupted or kTimeout leaves its request in flight; the next call on the
// client finishes it first, so that nothing is lost or applied twice. No pointer given to an
// earlier call is used then, except those of bind_table.
class ParamSet {
 public:
  // `membership` outlives it.
  ParamSet(Shared& shared, uint32_t id, const wire::ParamSetLayout& layout,
           const Membership& membership, const CacheLimits& limits = {});
  ParamSet(const ParamSet&) = delete;
  ParamSet& operator=(const ParamSet&) = delete;

  uint32_t id() const { return state_->id; }
  // Whether the servers had all values when it was opened: trainer 0 must not store them again.
  bool holds_values() const;
  // Where pulled rows of a static table go: `weight` is [rows, dim] and stays valid until close.
  void bind_table(uint32_t table, float* weight);
  void store_table(uint32_t table, std::span<const int64_t> keys, const float* weights,
                   const float* state, const uint32_t* counts, uint64_t step);
  // As store_table, of rows `begin` .. `end`; the whole table in the fewest bytes.
  void store_run(const RunValues& rows, uint64_t step);
  // These rows as store_run takes them, and the updates of the table as a whole.
  void fetch_run(const RunPlaces& rows, uint64_t* step);
  // `state`: state_elements of each block of the parameter, block by block, or null. `average`: as
  // the weights; null where none is kept, or it begins at them.
  void store_parameter(uint32_t parameter, const void* weights, const void* state, uint64_t step,
                       const void* average = nullptr);
  // Rows of a snapshot, or the version that it is of, to one server, which reads them from its own
  // directory. By trainer 0, between two steps of all; the others pull everything afterwards.
  void load(uint32_t server, const wire::Load& what);
  // What all servers together count of a table; any thread.
  wire::TableCounts table_counts(uint32_t table);
  // Rows of a table that are to go by its spec go now, on all servers; behind the pushes of this
  // trainer. Returns how many. What was pulled before stays as it is until the next step.
  uint64_t shrink(uint32_t table);
  // Trainer 0 after its last store; the others wait here for it (round deadline).
  void ready();
  // `state` as in store_parameter; either may be null.
  void fetch_parameter(uint32_t parameter, void* weights, void* state, uint64_t* step);

  // Makes the rows of `ids` current in the bound weight: sends one request per server for those not
  // pulled since the last step of this parameter set. int32 or int64 ids. Returns how many rows
  // were asked for. Throws kRowOutOfRange.
  uint64_t pull(uint32_t table, const void* ids, uint64_t count, bool ids_are_int32);
  // The same for a table of either kind, and copies the rows to `out`, [count, dim], in the order
  // of the ids. `keep`: as long as a step lasts, for a gradient and for later lookups; else rows of
  // a remote table that are not here already are pulled, copied and forgotten, in chunks.
  uint64_t lookup(uint32_t table, const void* ids, uint64_t count, bool ids_are_int32, float* out,
                  bool keep);
  // What lookups are likely to want, to be kept, of all tables in one request per server. Returns
  // for each how many rows were asked for; nothing is where a call before has to be finished first,
  // while this trainer takes no part, and of ids of which one is no row.
  std::vector<uint64_t> pull_together(std::span<const GuessedIds> guesses);
  // The values of the distinct rows `keys` in the bound weight, for who reads it without a lookup.
  // A gradient that names them is refused as before. Throws kRowOutOfRange.
  void read_rows(uint32_t table, std::span<const int64_t> keys);
  // The values of the distinct rows `keys` as the servers have them, to `out`, [keys, dim]; nothing
  // is kept of it here. Throws kRowOutOfRange.
  void fetch_rows(uint32_t table, std::span<const int64_t> keys, float* out);
  void pull_all_rows();  // of static tables, in chunks
  // Asks for the rows of a batch to come, one request per server, and returns its number at once.
  // Lookups then find them: in rounds with the values of the last one. A batch goes with the step
  // that used all its rows, or if `managed`, with the step after use_prefetched(its number). Does
  // nothing, and returns 0, while this trainer takes no part. Throws kRowOutOfRange.
  uint64_t prefetch(std::span<const ComingIds> ids, bool managed);
  void use_prefetched(uint64_t number);
  void drop_prefetched();
  // `weights`: base pointer of every dense parameter, in order.
  void pull_dense(std::span<void* const> weights);
  // From now on pulls bring the averages that the servers keep, exactly, or again the values. What
  // was pulled before is stale, for gradients too; meanwhile steps and stores are refused and
  // nothing is prefetched. Throws kInvalidArgument where the layout has no average.
  void read_averages(bool averages);

  // Sends dense gradients of the step to come to servers on other hosts, and does not wait: what
  // they are at the push counts. Returns the bytes that went; 0 where that is of no use. Costs a
  // copy of each, and a comparison by the push. By the thread that pushes.
  uint64_t push_early(std::span<const ParameterGradient> gradients);
  bool may_push_early() const;  // whether any would go
  // Of gradients that went so, and of those that changed before their push.
  std::pair<uint64_t, uint64_t> early_bytes() const {
    return {state_->early.sent_bytes(), state_->early.changed_bytes()};
  }
  // One step: joins first if this trainer has left; returns when the round is applied on every
  // server and the updated blocks are written to `weight`. Throws kUnpulledRow before anything is
  // sent. Pulled rows count as stale afterwards. Returns the number of the update: of the round, or
  // with several groups of trainers among the updates of server 0 by all of them.
  uint64_t push(const StepPush& step);

  // ---- cuts of snapshots ----
  // Marks a cut, after all pushes so far, and waits until it is taken or given up; a name from the
  // trainer that asks for it, else none. `wait_ms`: how long servers wait for all markers; `base`:
  // see wire::Cut.
  CutAnswer mark_cut(uint64_t number, const std::string& name, uint64_t wait_ms, uint64_t base = 0);
  // While another thread waits in mark_cut(): see client::take_marker_back.
  void take_marker_back(uint64_t number);
  // From now on replies to pushes ask for markers of this number; of the caller, too, who must not
  // mark before it is asked where others wait for its next push. Returns why servers refuse it;
  // empty if none does.
  std::string announce_cut(uint64_t number, const std::string& name, uint64_t wait_ms);
  // What is open, being written or written of this number is dropped by all servers.
  void abandon_cut(uint64_t number);
  // The cut that the last replies to pushes ask this trainer's marker for; 0: none.
  uint64_t cut_wanted() const;
  // How far one server is with what was cut. Number 0: whether a file `token` lies in its directory
  // of snapshots.
  wire::CutStatus cut_status(uint32_t server, uint64_t number, const std::string& token);

  // What lossy pushes of this trainer hold back, in rounds: null where nothing is, as nothing is
  // rounded or a queue's thread does that. By the thread that pushes, between two pushes.
  Residues* residues();

  void drain();  // until what was handed to those who send beside it is applied
  // Takes part again; rows and dense values of before are to be pulled anew. With a bound on
  // staleness also needed after a barrier, and before the next gradient is computed.
  void join();
  // Takes part again in this set and in `last`, which is updated in rounds and which every trainer
  // steps after this one: in both from one step on. Throws kInvalidArgument for a member of one.
  void join_with(ParamSet& last);

  void leave();
  bool is_member() const;
  void close();
  // Ends what goes on beside in the memory of bound weights. They may be freed then, also where
  // the servers are not told of a close.
  void forget_weights();

  // ---- for what is built on a set ----
  void check_open() const;  // throws kClosed
  Shared& shared() const { return shared_; }
  const std::shared_ptr<SetState>& state() const { return state_; }
  Prefetcher& prefetcher() const { return *prefetcher_; }
  // Whether all servers count the same rounds of it.
  bool counts_rounds() const { return membership_.counts_rounds(); }
  bool has_background() const;
  // It is drained before what reads or changes the servers, and stopped when the set is closed.
  // Throws kInvalidArgument where there is one.
  void attach(std::shared_ptr<Background> background);

 private:
  friend class Client;
  friend class Shared;
  void accept_open(std::span<const RequestPtr> replies);
  void accept_barrier(uint64_t round);
  std::shared_ptr<Background> background() const;  // null: it has none
  void drain_background();
  void stop_background();  // without locks: a thread of it may wait for one
  void add_stats(ClientStats* stats) const;
  void join_sequenced();
  CutAnswer send_cut(const wire::Cut& cut);
  void forget_rows();  // rows that are here or on their way are not to be used any more

  Shared& shared_;
  const std::shared_ptr<SetState> state_;
  const std::shared_ptr<Prefetcher> prefetcher_;
  const Membership& membership_;
  std::atomic<bool> closing_{false};  // the servers are told, and nothing was released yet
  mutable std::mutex mutex_;          // of what follows
  std::shared_ptr<Background> background_;
};

}  // namespace cpudist::client
