// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A trainer's end: talks to every server, retries, reconnects, numbers its requests, packs pushes
// straight from gradients and writes pulled rows straight into the trainer's weights.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/channel.h"
#include "wire/messages.h"

namespace cpudist::client {

struct ClientOptions {
  uint64_t run_id = 0;
  uint32_t trainer_rank = 0;
  uint32_t trainer_count = 1;
  uint32_t incarnation = 1;
  uint64_t liveness_ms = 5000;
  uint64_t reconnect_grace_ms = 500;
  uint64_t connect_deadline_ms = 60000;
  uint64_t rpc_deadline_ms = 180000;
  uint64_t round_deadline_ms = 1800000;
  uint64_t probe_ms = 1000;   // how often a waiting sequenced request asks whether it arrived
  uint64_t resend_ms = 1000;  // idempotent requests, only on links that are not reliable()
  // How often one request is sent again because its connection broke before the answer.
  uint32_t rpc_retries = 3;
  uint64_t straggler_log_ms = 30000;
  std::string host;
  // One list per shard, best first; the first that answers is used.
  std::vector<std::vector<std::string>> servers;
  // Called every 50 ms by a waiting thread without locks held; true ends the wait with
  // Error(kInterrupted).
  std::function<bool()> interrupted;
  // (level, text): progress of long waits; level 0 warning, 1 info, 2 debug.
  std::function<void(int, const std::string&)> log;
};

// How old gradients were when they were applied: updates, and samples behind them, between the
// reading of the oldest value and the update. Bucket 0 counts the age 0, bucket i ages from 2^(i-1)
// to 2^i - 1.
struct StalenessStats {
  static constexpr size_t kBuckets = 65;
  std::array<uint64_t, kBuckets> steps{};
  std::array<uint64_t, kBuckets> samples{};
  uint64_t pushes = 0;
  uint64_t merged = 0;      // pushes that travelled with an earlier one
  uint64_t overloaded = 0;  // refusals for lack of memory, sent again
  uint64_t steps_sum = 0;
  uint64_t samples_sum = 0;
  uint64_t steps_max = 0;
  uint64_t samples_max = 0;
  void add(const StalenessStats& other);
  // A push, by what each server had when its values were `read` (kAnyStaleness: nothing was) and
  // after the update that `applied` it.
  void count(std::span<const wire::Version> read, std::span<const wire::Version> applied,
             uint64_t own_samples);
};

// Of a parameter set that is updated on arrival.
struct QueueOptions {
  uint32_t size = 1;        // pushes that may wait while one is on its way
  uint32_t max_merge = 1;   // of them that travel as one
  std::vector<bool> mean;   // per parameter group: merged by the mean, else by the sum
  uint32_t pull_every = 1;  // pushes between two replies with dense values
};

// Of a parameter set whose trainers step by themselves and exchange deltas.
struct ExchangeStats {
  uint64_t exchanges = 0;
  uint64_t rows_sent = 0;
  uint64_t rows_received = 0;
  uint64_t shadow_rows = 0;
  uint64_t memory_bytes = 0;  // shadows of rows and of dense parameters, marks of rows
  double busy_s = 0;          // of the training thread, in slices
};

struct ClientStats {
  uint64_t bytes_sent = 0;  // sum over connections, headers included
  uint64_t bytes_received = 0;
  uint64_t requests = 0;
  uint64_t resent = 0;
  uint64_t reconnects = 0;
  uint64_t rows_pulled = 0;
  uint64_t rows_pushed = 0;
  uint64_t rows_prefetched = 0;     // asked for before a lookup
  uint64_t prefetch_hits = 0;       // rows of a lookup that a prefetch had brought
  uint64_t prefetch_refreshed = 0;  // prefetched rows that came again with a round
  double wait_s = 0;                // blocked on servers, all requests
  double round_wait_s = 0;          // of which in pushes, commits and barriers
  StalenessStats staleness;
};

struct ParameterGradient {  // one dense parameter with a gradient
  uint32_t parameter = 0;
  const void* gradient = nullptr;  // contiguous, the parameter's dtype
};
struct TableGradient {  // the COO gradient of one table, duplicates allowed
  uint32_t table = 0;
  const int64_t* keys = nullptr;
  uint64_t count = 0;
  const float* rows = nullptr;  // [count, dim], contiguous
};
// Memory of the trainer's that an update of rows writes to.
struct LocalRows {
  float* weight = nullptr;     // [rows, dim]
  float* state = nullptr;      // [rows, state elements]; null if the optimizer has none
  uint32_t* counts = nullptr;  // [rows], updates of each row
};
// Ids of a batch to come, of one table. A table may be named more than once.
struct ComingIds {
  uint32_t table = 0;
  const void* ids = nullptr;
  uint64_t count = 0;
  bool are_int32 = false;
};
struct StepPush {
  double weight = 1.0;
  uint64_t samples = 0;
  bool by_samples = false;
  double clip_value = 0.0;
  double clip_norm = 0.0;
  std::vector<kernels::OptimizerConfig> configs;
  std::vector<ParameterGradient> parameters;
  std::vector<TableGradient> tables;
  // Base of every dense parameter, in order: blocks that only other trainers had a gradient for are
  // written as well.
  std::vector<void*> weights;
};

// A connector calls a handler and the handler is inside the client, so the client makes its own.
using ConnectorFactory =
    std::function<std::shared_ptr<transport::Connector>(transport::ConnectionHandler*)>;

// Thread safety: any thread; requests that change a server (push, leave, join, store, barrier) are
// serialised by the client. No call is made with the GIL held.
//
// A wait that ends with kInterrupted or kTimeout leaves its request in flight; the next call on the
// client finishes it first, so that nothing is lost or applied twice. No pointer given to an
// earlier call is used then, except those of bind_table.
class Client {
 public:
  Client(ClientOptions options, const ConnectorFactory& make_connector);
  ~Client();  // closes the links without a goodbye; bounded
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  void connect();  // hello with every server; throws kPeerLost, kAddress, kConfigMismatch, kFenced

  // Returns the id: the n-th open of every trainer names the same parameter set.
  uint32_t open(const wire::ParamSetLayout& layout);
  // Whether the servers had all values when it was opened: trainer 0 must not store them again.
  bool holds_values(uint32_t param_set) const;
  // Where pulled rows go: `weight` is [rows, dim] and stays valid until close.
  void bind_table(uint32_t param_set, uint32_t table, float* weight);
  void store_table(uint32_t param_set, uint32_t table, std::span<const int64_t> keys,
                   const float* weights, const float* state, const uint32_t* counts, uint64_t step);
  // `state`: state_elements of each block of the parameter, block by block, or null.
  void store_parameter(uint32_t param_set, uint32_t parameter, const void* weights,
                       const void* state, uint64_t step);
  // Trainer 0 after its last store; the others wait here for it (round deadline).
  void ready(uint32_t param_set);
  void fetch_table(uint32_t param_set, uint32_t table, std::span<const int64_t> keys,
                   float* weights, float* state, uint32_t* counts, uint64_t* step);
  // `state` as in store_parameter; either may be null.
  void fetch_parameter(uint32_t param_set, uint32_t parameter, void* weights, void* state,
                       uint64_t* step);

  // Makes the rows of `ids` current in the bound weight: sends one request per server for those not
  // pulled since the last step of this parameter set. int32 or int64 ids. Throws kRowOutOfRange.
  void pull(uint32_t param_set, uint32_t table, const void* ids, uint64_t count,
            bool ids_are_int32);
  void pull_all_rows(uint32_t param_set);  // in chunks
  // Asks for the rows of a batch to come, one request per server, and returns its number at once.
  // Lookups then find them: in rounds with the values of the last one. A batch goes with the step
  // that used all its rows, or if `managed`, with the step after use_prefetched(its number). Does
  // nothing, and returns 0, while this trainer takes no part. Throws kRowOutOfRange.
  uint64_t prefetch(uint32_t param_set, std::span<const ComingIds> ids, bool managed);
  void use_prefetched(uint32_t param_set, uint64_t number);
  void drop_prefetched(uint32_t param_set);
  // `weights`: base pointer of every dense parameter, in order.
  void pull_dense(uint32_t param_set, std::span<void* const> weights);

  // One step: joins first if this trainer has left; returns when the round is applied on every
  // server and the updated blocks are written to `weight`. Throws kUnpulledRow before anything is
  // sent. Pulled rows count as stale afterwards. Returns the number of the update: of the round, or
  // with several groups of trainers among the updates of server 0 by all of them.
  uint64_t push(uint32_t param_set, const StepPush& step);

  // ---- updates on arrival ----
  void start_queue(uint32_t param_set, const QueueOptions& options);
  // One step: packs the gradient, queues it and takes the newest dense values in that have come.
  // Waits for room in the queue; with max_staleness until it is applied. Throws what an earlier
  // push failed with; kUnpulledRow before anything is queued; after kInterrupted and kTimeout it is
  // queued. Returns the version of server 0's values.
  uint64_t enqueue(uint32_t param_set, const StepPush& step);
  void drain(uint32_t param_set);  // until everything queued is applied
  // Steps of all trainers, as far as server 0 has told, and those of this one that it has not
  // answered yet. A merged push counts each of its steps.
  uint64_t known_steps(uint32_t param_set);
  // Takes part again; rows and dense values of before are to be pulled anew. With a bound on
  // staleness also needed after a barrier, and before the next gradient is computed.
  void join(uint32_t param_set);

  // ---- deltas of trainers that step by themselves ----
  // After start_queue. `alone`: there is no other trainer and never will be.
  void start_exchange(uint32_t param_set, bool alone, uint64_t memory_cap_bytes);
  // The weights are the servers' now. `weights`: base of every dense parameter, in order.
  void reset_exchange(uint32_t param_set, std::span<void* const> weights);
  // Takes back what dense parameters and tables moved since their last exchange.
  void undo_movement(uint32_t param_set, std::span<void* const> weights,
                     std::span<const uint32_t> parameters, std::span<const uint32_t> tables);
  // One step on rows of a table, by this trainer. Throws kRowOutOfRange before it changes anything.
  void update_rows(uint32_t param_set, const TableGradient& gradient, const LocalRows& rows,
                   const kernels::OptimizerConfig& config, int64_t step);
  // As GeoExchange::begin.
  void begin_exchange(uint32_t param_set, bool whole, bool averages, uint64_t steps,
                      uint64_t samples);
  // At least one slice of it, and more until `budget_s` is over. True when none is under way.
  bool advance_exchange(uint32_t param_set, std::span<void* const> weights, double budget_s);
  void finish_exchange(uint32_t param_set, std::span<void* const> weights);
  // Whether rows are left that did not fit the last push or its reply.
  bool exchange_has_more(uint32_t param_set);
  uint64_t exchange_steps(uint32_t param_set);  // of all trainers, as far as told, and handed on
  ExchangeStats exchange_stats(uint32_t param_set);

  void leave(uint32_t param_set);
  bool is_member(uint32_t param_set) const;
  void barrier();  // leaves every parameter set, waits for all, rejoins all
  void close(uint32_t param_set);
  void goodbye();                         // to every server; then disconnects
  void check() const;                     // throws what the client has failed with: a lost server
  void abort(const std::string& reason);  // ends every wait of this client with Error(kClosed)
  ClientStats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cpudist::client
