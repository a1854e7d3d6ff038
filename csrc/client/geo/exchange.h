// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The exchange of deltas between a trainer that steps by itself and the servers, in slices between
// steps: docs/strategies.md, "Geo".
//
// Memory: the training thread alone writes weights and shadows; which rows of remote tables are
// here, and who reads them, is in client/geo/slot_keeper.h. A payload belongs to it until it is
// packed, then to the queue's thread; a reply the other way round.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/arrivals/queue.h"
#include "client/geo/slot_keeper.h"
#include "client/geo/table.h"
#include "client/param_set.h"
#include "client/push/step.h"

namespace cpudist::client {

// What servers move by, in means of the trainers' movements.
struct OuterStep {
  double rows = 0;  // 0, with `dense`: movements add up. kRootStep: the square root of N
  double dense = 0;
};
constexpr double kRootStep = -1.0;

// Of a parameter set whose trainers step by themselves and exchange deltas.
struct ExchangeStats {
  uint64_t exchanges = 0;
  uint64_t rows_sent = 0;
  uint64_t rows_received = 0;
  uint64_t shadow_rows = 0;
  uint64_t memory_bytes = 0;  // shadows of rows and of dense parameters, marks of rows, slots
  uint64_t slot_rows = 0;     // of remote tables
  uint64_t slot_bytes = 0;    // as their budget counts them
  uint64_t retired_rows = 0;  // whose slots were given up for the budget
  double busy_s = 0;          // of the training thread, in slices
  double wait_s = 0;          // of the training thread, for answers
};

struct ExchangeOptions {
  // There is no other trainer and never will be; nothing is remembered for an exchange.
  bool alone = false;
  // What pushes may hold on a server, 0 for no cap; an exchange goes in as many pushes as that
  // takes.
  uint64_t push_cap_bytes = 0;
  // What slots of remote tables may take; above it the next exchange gives some up.
  uint64_t cache_bytes = UINT64_MAX;
  // By table, how this trainer updates it. May be left out where no table is remote.
  std::vector<kernels::OptimizerConfig> rules;
};

// Rows of a table that a trainer has moved since they were last exchanged, as a snapshot has them:
// keys, values, what those were then, and whether the next exchange hands the row on in any case.
struct MovedArrays {
  int64_t* keys = nullptr;
  float* values = nullptr;  // [rows, dim]
  float* agreed = nullptr;  // [rows, dim]
  uint8_t* touched = nullptr;
};

// It holds its parameter set, which knows nothing of it; all throw kClosed once that is closed.
//
// Thread safety: one caller at a time, the training thread.
class GeoExchange {
 public:
  // Starts the queue of the set, once for a set. Throws Error(kOverloaded) if no row fits a push.
  GeoExchange(std::shared_ptr<ParamSet> set, ExchangeOptions options);
  ~GeoExchange() = default;
  GeoExchange(const GeoExchange&) = delete;
  GeoExchange& operator=(const GeoExchange&) = delete;

  // One step on rows of a table, by this trainer; `rows` of a static one. Throws kRowOutOfRange,
  // and of a remote table kUnpulledRow, before it changes anything.
  void update_rows(const TableGradient& gradient, const LocalRows& rows,
                   const kernels::OptimizerConfig& config, int64_t step);
  // Of remote tables, as SlotKeeper does them: the first at the end of each step, the others while
  // nothing is under way.
  void forget_lookups();
  void refresh_slots();
  void store_slots();
  void keep_budget();
  uint64_t slot_count(uint32_t table);
  void read_slots(uint32_t table, const SlotArrays& to);
  void write_slots(uint32_t table, uint64_t rows, const SlotArrays& from);
  // What this trainer has moved and not handed on, while nothing is under way: so many rows, to
  // arrays of so many; and the same from such arrays, on top of the values that are here, which are
  // the servers'. Returns how many of them are here: rows of a static table, and of a remote one
  // those with a slot. Throws kInternal for a trainer that is alone.
  uint64_t moved_count(uint32_t table);
  void read_moved(uint32_t table, const MovedArrays& to);
  uint64_t write_moved(uint32_t table, uint64_t rows, const MovedArrays& from);
  // Dense parameters, in order, as they were when last exchanged; null leaves one out.
  void read_agreed(std::span<void* const> to) const;
  void write_agreed(std::span<void* const> from);
  // `weights`, here and below: base of every dense parameter, in order. They are as the servers
  // hold them now: no movement, nothing under way.
  void reset(std::span<void* const> weights);
  // These parameters and tables become what they were when last exchanged.
  void undo(std::span<void* const> weights, std::span<const uint32_t> parameters,
            std::span<const uint32_t> tables);
  // Starts an exchange; one that is under way must be finished before. `whole`: of every row, and
  // not only of what was touched. Joins first if this trainer has left. Where it throws, memory
  // that ran out included, none has begun and no movement is forgotten.
  //
  // On arrival a trainer hands on a share of its movement. Where movements add up that is 1/N, of N
  // trainers that take part; the rest it keeps, to hand it on later, all of it when `whole`. Else
  // step/N, at most 1, `whole` too, and the rest is dropped, so that the servers move by step times
  // the mean of the trainers' movements.
  void begin(bool whole, const OuterStep& step, uint64_t steps, uint64_t samples);
  // At least one slice, and more until `budget_s` is over. True when no exchange is under way.
  // Where memory runs out, here and below, the next call goes on.
  bool advance(std::span<void* const> weights, double budget_s);
  // So many slices that packing, and later taking the answers in, is spread over a tenth of the
  // interval each: if servers answer in time the exchange is over before the next is due. `left`:
  // calls until then, of `interval`. Waits for nobody. True when no exchange is under way.
  bool keep_pace(std::span<void* const> weights, uint64_t left, uint64_t interval);
  // Until it is over, waiting for the servers; the wait is counted. Throws as PushQueue::drain
  // does, and may be called again then.
  void finish(std::span<void* const> weights);
  // Queues the marker of a cut, as AsyncPushes does, behind the push of the last exchange that has
  // begun, which is packed to its end first. It waits for other trainers; exchanges go on meanwhile
  // until one's push stands behind it.
  void mark_cut(std::span<void* const> weights, uint64_t number, const std::string& name,
                uint64_t wait_ms, uint64_t hold_ms = 0);
  // What the marker was answered with, once; nothing before.
  std::optional<CutAnswer> cut_answer();
  // Rows are left that did not fit the last push, or, unless that would be another round of all
  // trainers, the last reply.
  bool has_more() const;
  bool has_unsent() const { return unsent_; }  // only the former
  // Steps of all trainers behind what was received or pulled last, and those that are on their way.
  uint64_t steps() const;
  ExchangeStats stats() const;

 private:
  enum class Phase { kIdle, kPack, kTravel, kApply };
  enum class Part { kBlock, kRows, kAgreed };
  // A run of elements of a block or of rows of a table, small enough to be done at once.
  struct Slice {
    uint32_t server;
    Part part;
    uint32_t index;  // of the section in the payload, or in agreed_
    uint64_t begin;
    uint64_t end;
  };
  struct Outgoing {
    std::vector<uint32_t> blocks;
    std::vector<std::vector<int64_t>> keys;  // by table
    std::vector<size_t> retired;             // by table, from which key on they are
    wire::FilledPush filled;
  };
  // Rows that did not fit a push.
  struct Left {
    uint32_t table;
    uint32_t server;
    std::vector<int64_t> keys;
  };
  // Of averaged movement: what handed on rows are on the server if nobody else moves them.
  struct Agreed {
    uint32_t table;
    std::vector<int64_t> keys;
    std::vector<float> rows;
  };

  GeoTable& table(uint32_t index);
  void check_idle(const char* what) const;
  void check_movement(const char* what) const;  // and that there is somebody to hand it on to
  std::vector<int64_t> moved_keys(uint32_t index, size_t* touched);
  float* row(uint32_t index, int64_t key) {
    return tables_[index].row(key, set_.table(index).weight());
  }
  void check(std::span<void* const> weights) const;
  // Until `deadline`, the end of these slices, the end of the exchange, or an answer is missing.
  bool work(std::span<void* const> weights, TimePoint deadline, uint64_t slices);
  void choose_rows(uint32_t table);
  void lay_out(uint64_t steps, uint64_t samples);
  void pack(const Slice& slice, std::span<void* const> weights);
  void pack_rows(const Slice& slice);
  void pack_block(const Slice& slice, std::span<void* const> weights);
  // negated = minus the share that is handed on of what `weight` has moved since `shadow`, rounded
  // by `round`. `shadow` moves with it, and `agreed` (may be null) is where; if the rest is dropped
  // `shadow` goes on to the weight, which goes back when the answer is there.
  template <typename T, typename Round>
  void hand_on(T* weight, T* shadow, T* negated, size_t count, T divisor, const Round& round,
               T* agreed);
  // What the movement of this exchange is rounded to. All of it never is, nor is that of rows that
  // go: a rest too small for the type would keep them for ever.
  wire::WireDType dtype() const {
    return exact_ ? wire::WireDType::kFloat32 : set_.layout.push_dtype;
  }
  void send();
  void receive();
  void apply(const Slice& slice, std::span<void* const> weights);
  void apply_rows(const Slice& slice, uint32_t table, std::span<const int64_t> keys,
                  std::span<const float> rows);
  void end_exchange();
  void add_slices(uint32_t server, Part part, uint32_t index, uint64_t count, uint64_t size);
  template <typename T>
  T* weight_of(const wire::BlockSpec& block, std::span<void* const> weights,
               uint64_t element) const;
  template <typename T>
  T* shadow_of(const wire::BlockSpec& block, uint64_t element);

  const std::shared_ptr<ParamSet> owner_;
  SetState& set_;  // of the owner
  const wire::Pool pool_;
  const bool alone_;
  uint64_t rows_bytes_;  // of one table in a push to one server, at most
  const std::shared_ptr<PushQueue> queue_;
  std::vector<GeoTable> tables_;
  SlotKeeper slots_;
  std::vector<kernels::AlignedBuffer<uint8_t>> dense_shadows_;  // by parameter

  Phase phase_ = Phase::kIdle;
  bool whole_ = false;
  bool exact_ = false;  // nothing of this exchange is rounded
  bool averages_ = false;
  double rows_divisor_ = 1.0;
  double dense_divisor_ = 1.0;
  uint32_t members_;
  uint64_t steps_ = 0;       // of all trainers, with the last answer
  uint64_t travelling_ = 0;  // of this one, behind what is on its way
  bool more_ = false;
  bool unsent_ = false;
  std::vector<Outgoing> outgoing_;  // by server
  std::vector<Left> left_;          // until the exchange has begun
  QueuedPush push_;                 // what is packed, until the queue has it
  std::vector<float> unmoved_;      // shadows of a slice before their movement was rounded
  std::vector<Agreed> agreed_;      // by server and table, until the answer is taken in
  std::vector<wire::Frame> replies_;
  std::vector<wire::ChangesView> views_;
  std::vector<Slice> slices_;
  size_t next_slice_ = 0;
  uint64_t more_calls_ = 0;  // of keep_pace, for the slices of this phase
  ExchangeStats stats_;
};

}  // namespace cpudist::client
