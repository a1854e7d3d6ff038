// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One server's share of a table: row records (key, count, last_seen, weight, optimizer state,
// average if one is kept) in slabs with stable addresses, and an index of them. Work on rows is
// split into shards; a key's shard is a fixed function of its bucket, so that the split of a round
// over threads never changes a result.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/memory_cap.h"
#include "kernels/aligned.h"
#include "kernels/hash.h"
#include "kernels/initial.h"
#include "kernels/optimizers.h"
#include "table/admission/rule.h"
#include "table/ahead.h"
#include "table/average.h"
#include "table/eviction.h"
#include "table/row_images.h"
#include "table/row_index.h"
#include "table/slabs.h"
#include "wire/layout.h"
#include "wire/rows.h"
#include "wire/runs.h"

namespace cpudist::table {

struct RowHeader {
  // In place of a count: the record is of no row, and `key` is the next such record.
  static constexpr uint32_t kNoRow = 0xffffffffu;
  static constexpr uint32_t kMostUpdates = kNoRow - 1;

  int64_t key;
  uint32_t count;  // updates of this row, kMostUpdates at most
  // Low half of the round of its last update; of a row without one, of when it came.
  uint32_t last_seen;

  bool is_row() const { return count != kNoRow; }
  void count_update() { count += count < kMostUpdates ? 1 : 0; }
};
static_assert(sizeof(RowHeader) == 16);

// A row that has lost its place, and its record.
struct Freed {
  int64_t key;
  uint32_t record;
};

// What a sweep is to look at.
struct Sweep {
  uint64_t updates = 0;  // of the set so far; rows of the last one stay
  TimePoint now;
  uint64_t records = 0;                 // to look at, at least; all at most
  uint64_t most = 0;                    // rows to free
  std::span<const uint32_t> used = {};  // records that others still refer to, in order
};

struct Swept {
  std::span<const Freed> freed;  // until the next sweep
  uint64_t records = 0;          // looked at
};

// Rows as a file has them, column by column: `rows` of each. The addresses need no alignment; null
// where there are none.
struct RowColumns {
  uint64_t rows = 0;
  uint64_t step = 0;                   // updates of the table as a whole
  const uint8_t* keys = nullptr;       // int64
  const uint8_t* weights = nullptr;    // float, dim of each row
  const uint8_t* state = nullptr;      // float, state_elements() of each; null: the initial state
  const uint8_t* counts = nullptr;     // uint32; null: none was ever updated
  const uint8_t* last_seen = nullptr;  // uint32
  const uint8_t* averages = nullptr;   // as of the row's last update; null: the weights
  uint32_t later = 0;                  // by which updates are counted here; modulo 2^32
};

// Where the parts of a record are, and which bucket it belongs to.
struct RecordShape {
  uint64_t stride = 0;  // bytes
  uint32_t dim = 0;
  uint32_t state_elements = 0;
  bool averaged = false;
  uint64_t salt = 0;
};

// Thread safety: const members from any number of threads; the others exclusively, except that
// different threads may write through header(), weight() and state() of different records, after
// before_change().
class Table {
 public:
  static constexpr uint32_t kShards = 16;
  static constexpr uint64_t kMostRecords = 0x7fffffffu;  // numbers are also read as int32

  // `config` decides the state of a row until the table is dropped, `averaging` whether it has an
  // average. The table remembers no views. `ahead` makes its memory before it is needed; none: when
  // it is. `cap` counts what it keeps: planned_bytes() from the start, and what goes beyond.
  Table(uint32_t id, wire::TableSpec spec, const kernels::OptimizerConfig& config,
        uint32_t shard_id, uint32_t server_count, Averaging averaging = {},
        std::shared_ptr<MemoryAhead> ahead = nullptr, std::shared_ptr<MemoryCap> cap = nullptr);

  const wire::TableSpec& spec() const { return spec_; }
  uint32_t id() const { return id_; }
  uint32_t dim() const { return spec_.dim; }
  uint32_t state_elements() const { return state_elements_; }
  uint64_t step() const { return step_; }
  void count_step() { ++step_; }
  uint64_t row_count() const { return rows_; }
  // Records are numbered below that; some are of no row.
  uint64_t record_count() const { return records_; }
  uint64_t made_count() const { return made_; }  // rows that pushes have made, ever
  size_t slab_count() const { return slabs_.size(); }
  uint32_t rows_per_slab() const { return slabs_.per_slab(); }
  uint64_t size_bytes() const;
  // What it takes once all its rows are stored; a remote one, before there is any.
  uint64_t planned_bytes() const;
  // Of what rows of a remote table begin with that are not there: before anybody can read one, or
  // after all were dropped.
  void set_seed(uint64_t seed) {
    initial_.set_seed(seed);
    admission_.set_seed(seed);
  }

  // ---- which keys get a row, and how many may ----
  AdmissionRule& admission() { return admission_; }
  const AdmissionRule& admission() const { return admission_; }
  // Before keys are counted. Throws std::bad_alloc.
  void begin_admission();
  // Throws Error(kTableFull) where so many more rows would be too many.
  void check_bound(uint64_t more) const;
  // Of keys without a row, ever, that gather() was asked for.
  uint64_t unknown_reads() const { return *unknown_reads_; }
  // Rows of pushes, by their shard: which keys are hot.
  void count_pushed(uint32_t shard, uint64_t rows) const {
    (*pushed_rows_)[shard].fetch_add(rows, std::memory_order_relaxed);
  }
  std::vector<uint64_t> pushed_rows() const { return {pushed_rows_->begin(), pushed_rows_->end()}; }
  // What keys without a row read as: what a row begins with, or zeros if the spec says so.
  void fill_unknown(std::span<const int64_t> keys, float* out) const;

  // The record of each key, and its shard where `shards` is given. For a row that was never stored
  // or made it is RowIndex::kNone in a remote table, which has all rows; in others it throws
  // kInvalidArgument naming table and key. So it does for a remote table's row of another server.
  void find(std::span<const int64_t> keys, uint32_t* records, uint8_t* shards) const;

  // Copies the weights of `keys` to out, [keys, dim]; what a row of a remote table begins with, or
  // zeros if the table says so, where there is none, which makes none. Throws as find does.
  void gather(std::span<const int64_t> keys, float* out) const;
  // The averages of `keys` after `updates` of the set, [keys, dim]. Throws as find does.
  void gather_averages(std::span<const int64_t> keys, uint64_t updates, float* out) const;
  // Copies whole records, as gather does; `state` may be null if state_elements() is 0. Throws as
  // find does.
  void fetch(std::span<const int64_t> keys, float* weights, float* state, uint32_t* counts) const;
  // Throws kRowOutOfRange, kInvalidArgument (a row of another server, sizes that do not fit), and
  // kFull when record numbers would run out.
  void check(const wire::TableRows& rows) const;
  // Creates or overwrites rows. Throws as check does, before anything is changed.
  void store(const wire::TableRows& rows);

  // Memory for the rows of `keys`, none of which is there: making them does not throw then. Throws
  // std::bad_alloc, or kFull when record numbers would run out; the rows are as they were.
  void make_room(std::span<const int64_t> keys);
  // What that, or storing, would add to size_bytes(), but for what is then made ahead. Throws as
  // make_room.
  uint64_t growth_bytes(std::span<const int64_t> keys) const;
  // Frees what was made ahead, and returns how much that was.
  uint64_t give_up_ahead() noexcept { return slabs_.give_up_ahead(); }
  // Those of the keys of which there is no row, each once.
  std::vector<int64_t> absent(std::span<const int64_t> keys) const;
  std::vector<int64_t> absent(const wire::RunRef& run) const;
  // A row that is not there, for which there is room. It has a record, but neither weight nor state
  // before begin(): nobody else may look at the table meanwhile.
  uint32_t make(int64_t key);
  // What rows begin with: weight and state. From any number of threads for different records.
  void begin(std::span<const uint32_t> records) const;

  // ---- rows that go ----
  bool evicts() const { return eviction_.on(); }
  // Looks at the next records, round and round, and frees rows as the spec says: those that have
  // been unseen long enough, and those that are too many. Of the latter, the first by the spec's
  // order among all that it looks at; it looks at some for each that goes, more than it was asked
  // to if it must. Throws std::bad_alloc; then no row has gone.
  Swept sweep(const Sweep& sweep);
  uint64_t evicted_count() const { return evicted_; }  // rows, ever
  // How often rows were freed: records that were found before that may be of others now.
  uint64_t sweep_count() const { return sweeps_; }
  // Whether a row was freed after so many updates of the set, or later.
  bool freed_since(uint64_t updates) const { return sweeps_ > 0 && freed_at_ >= updates; }

  // ---- as snapshots have them ----
  // Throws as check(TableRows) does, kInvalidArgument for averages where none are kept.
  void check(const RowColumns& rows) const;
  // Creates or overwrites rows. Throws as check does, before anything is changed.
  void load(const RowColumns& rows);
  // Drops all rows; their memory is kept for the next ones. Record numbers that were found before
  // mean nothing any more: see generation(). A snapshot that has not copied them has failed.
  void clear();
  // Updates of the set are counted from elsewhere: `before` of them are `after` now. What rows say
  // of their last update moves along.
  void renumber(uint64_t before, uint64_t after);
  // How often rows were dropped.
  uint64_t generation() const { return generation_; }

  RecordShape shape() const;
  // From now on rows are kept as they are now until they are copied. One cut at a time. Throws
  // std::bad_alloc; then nothing is.
  void freeze(std::shared_ptr<ImageMemory> memory);
  // What that takes beside what `memory` counts.
  uint64_t freeze_bytes() const {
    return RowImages::size_bytes(records_, slabs_.per_slab(), kShards);
  }
  // Copies the records of the next slab as they were at the cut, rows_per_slab() at most, and
  // returns how many; some may be of no row. 0: all are copied. From one thread, while others use
  // const members.
  uint32_t copy_frozen(uint8_t* to);
  // The end of that: what is not copied is not kept any more. What it returns may be destroyed
  // without a lock.
  std::unique_ptr<RowImages> thaw();
  // Before a record is written to, by whoever works on its shard.
  void before_change(uint32_t record, size_t shard) {
    if (record - keep_begin_ < keep_count_) images_->keep(record, shard, record_at(record));
  }

  // ---- the rows of a run of keys that this server owns, in the order of the keys ----
  uint64_t owned_rows(uint64_t begin, uint64_t end) const;
  // As check, and throws kInvalidArgument where they are not as many as the run says.
  void check(const wire::RunView& run) const;
  void store(const wire::RunView& run);
  // As fetch. Throws kInvalidArgument for one that was never stored.
  void fetch(const wire::FetchRun& run, float* weights, float* state, uint32_t* counts) const;

  RowHeader& header(uint32_t record) const {
    return *reinterpret_cast<RowHeader*>(record_at(record));
  }
  float* weight(uint32_t record) const {
    return reinterpret_cast<float*>(record_at(record) + sizeof(RowHeader));
  }
  float* state(uint32_t record) const { return weight(record) + spec_.dim; }
  bool averaged() const { return averaging_.on(); }
  // The average of a row, as of the update before number `round` of the set: before that one.
  void settle_average(uint32_t record, uint64_t round) const;
  // After it.
  void follow_average(uint32_t record, uint64_t round) const;
  void prefetch_record(uint32_t record) const {
    const uint8_t* begin = record_at(record);
    for (uint64_t at = 0; at < slabs_.stride(); at += kernels::kCacheLineBytes) {
      __builtin_prefetch(begin + at, 1);
    }
  }

 private:
  uint8_t* record_at(uint32_t record) const { return slabs_.at(record); }
  uint64_t hash_of(int64_t key) const { return kernels::hash_of(key, salt_); }
  float* average(uint32_t record) const { return state(record) + state_elements_; }
  void begin_average(uint32_t record) const;  // at the row's value
  // Of the first `updates` of the set, those after the row's last one. Told by the low halves of
  // both, with a sign: a row may have come from a server that was ahead of them.
  uint32_t updates_since(uint32_t record, uint64_t updates) const;
  bool has_key(uint32_t record, int64_t key) const { return header(record).key == key; }
  // RowIndex::kNone for a row that is not there.
  uint32_t find_one(int64_t key, uint64_t hash) const {
    return index_.find(hash, [&](uint32_t record) { return has_key(record, key); });
  }
  // Of up to kBatch keys, kNone where there is none; the memory of many rows is asked for at once,
  // `prefetched` bytes of each record.
  void find_batch(std::span<const int64_t> keys, uint64_t* hashes, uint32_t* records,
                  size_t prefetched) const;
  // The same for hashes whose slots have been asked for.
  void find_hashed(std::span<const int64_t> keys, const uint64_t* hashes, uint32_t* records,
                   size_t prefetched) const;
  bool owns(uint64_t hash) const {
    return hash % kernels::kBucketCount - first_bucket_ < bucket_count_;
  }
  struct OwnedKeys;  // of a run, a batch at a time
  template <typename Batch>
  void each_owned(uint64_t begin, uint64_t end, const Batch& batch) const;
  void store_batch(const OwnedKeys& keys, const wire::RunView& run);
  void expect_rows();  // the first of many
  void load_row(uint32_t record, const RowColumns& rows, uint64_t row);
  void divide_buckets();  // into shards
  void check_room(std::span<const int64_t> keys) const;
  std::vector<uint64_t> hashes_of(std::span<const int64_t> keys) const;
  void count_index() noexcept;  // what it has grown by
  // The only place where a row comes into being; weight and state are the caller's.
  uint32_t create(int64_t key, uint64_t hash);
  // Records for so many more rows, those of no row included.
  uint64_t records_for(uint64_t more) const { return std::max(records_, rows_ + more); }
  // Fills freed_, and returns how many records it has looked at.
  uint64_t choose(const Sweep& sweep);
  void choose_beyond_bound(size_t count);
  void free_chosen();
  // The record of a row that is about to be written to.
  uint32_t record_to_write(int64_t key, uint64_t hash, uint32_t found);
  void check_key(int64_t key) const;
  void check_owner(int64_t key, uint64_t hash) const;
  // Of a row that is not there: it may be read all the same.
  void require_known(int64_t key, uint64_t hash) const;
  [[noreturn]] void throw_full() const;

  uint32_t id_;
  wire::TableSpec spec_;
  kernels::OptimizerConfig config_;
  uint32_t shard_id_;
  uint32_t server_count_;
  uint64_t salt_;
  kernels::InitialRows initial_;
  AdmissionRule admission_;
  Averaging averaging_;
  std::array<uint8_t, kernels::kBucketCount> shard_of_bucket_{};  // spares a division per row
  uint32_t state_elements_;
  uint64_t first_bucket_ = 0;  // of those that this server owns
  uint64_t bucket_count_ = 0;
  uint64_t likely_rows_;  // that this server will probably have at most
  uint64_t rows_ = 0;
  uint64_t records_ = 0;               // that have been of a row
  uint32_t unused_ = RowIndex::kNone;  // the first record of no row
  uint64_t made_ = 0;
  uint64_t most_rows_ = 0;  // that pushes may make here; 0: any number
  std::unique_ptr<std::atomic<uint64_t>> unknown_reads_;  // counted by readers
  // By threads of a round, each its own shard.
  std::unique_ptr<std::array<std::atomic<uint64_t>, kShards>> pushed_rows_;
  Eviction eviction_;
  uint64_t updates_ = 0;  // of the set, as of the last sweep
  uint64_t hand_ = 0;     // the record that the next sweep begins at
  uint64_t evicted_ = 0;
  uint64_t sweeps_ = 0;    // that have freed something
  uint64_t freed_at_ = 0;  // updates of the set at the last of them
  std::vector<Freed> freed_;
  struct Candidate {
    uint64_t rank;
    Freed row;
  };
  std::vector<Candidate> candidates_;
  uint64_t step_ = 0;
  uint64_t generation_ = 0;
  std::unique_ptr<MemoryCap::Kept> kept_;  // of slabs and index
  Slabs slabs_;
  RowIndex index_;
  uint64_t counted_index_bytes_ = 0;
  // Of a cut: what changed rows were, and which records are still to be copied.
  std::unique_ptr<RowImages> images_;
  uint32_t keep_begin_ = 0;
  uint32_t keep_count_ = 0;
};

}  // namespace cpudist::table
