// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The trainer's copy of one table: which rows are current, and what a lookup has to ask the servers
// for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/cache/budget.h"
#include "client/cache/row_places.h"
#include "client/cache/trained_rows.h"
#include "kernels/aligned.h"
#include "kernels/partition.h"
#include "wire/messages.h"

namespace cpudist::client {

// Splits keys by owning server. Scratch memory lives on between calls; not thread safe.
class KeySplit {
 public:
  // owners: one entry per bucket.
  KeySplit(std::span<const uint16_t> owners, uint32_t server_count, uint64_t salt)
      : owners_(owners), server_count_(server_count), salt_(salt) {}
  void run(std::span<const int64_t> keys);
  // Positions in `keys` of those that `server` owns, in their order.
  std::span<const uint32_t> positions(uint32_t server) const {
    return std::span(order_).subspan(offsets_[server], offsets_[server + 1] - offsets_[server]);
  }
  size_t count(uint32_t server) const { return offsets_[server + 1] - offsets_[server]; }

 private:
  std::span<const uint16_t> owners_;
  uint32_t server_count_;
  uint64_t salt_;
  kernels::KeyPartitioner partitioner_;
  std::vector<uint32_t> order_;
  std::vector<uint32_t> offsets_;
};

// A row is current iff its stamp is the generation. Gradients may name rows with a stamp of at
// least `floor`: those pulled since the last step, even if a lookup outside of rounds has asked
// anew since. Callers hold `mutex`, for the whole of a pull: a second thread must not read a row
// before it is there.
//
// Rows of batches to come that are not current have stamps of their own: what was asked for and is
// not in the weight (pending), and what a lookup may take as current (held).
//
// Rows of a static table are those of the bound weight, each with a mark. A remote one has marks
// and values of the rows that its step has named, and of those held over it; beyond a budget the
// values go earlier than their marks, and are asked for again by the next lookup. Where its trainer
// steps rows by itself, lookups take those from there instead of the servers.
class TableCache {
 public:
  // Remote tables count what they hold in `budget`, which outlives it; null: they have no limit.
  // `generation`: where the count of invalidate() begins.
  TableCache(const wire::TableSpec& spec, uint64_t salt, std::span<const uint16_t> owners,
             uint32_t server_count, CacheBudget* budget = nullptr, uint32_t generation = 1);
  ~TableCache();
  TableCache(const TableCache&) = delete;
  TableCache& operator=(const TableCache&) = delete;

  std::mutex mutex;
  // Of frames with rows or keys of this table, as they travel, without repeats.
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> bytes_received{0};
  const wire::TableSpec& spec() const { return spec_; }
  bool remote() const { return remote_; }
  float* weight() const { return weight_; }  // of a static table
  void bind(float* weight);                  // forgets every row; of static tables
  // Whether rows have somewhere to go. The weight of a table without rows is null.
  bool bound() const { return bound_ || remote_; }
  KeySplit& split() { return split_; }
  // Of a remote table, which outlives that or is told of its end with null.
  void take_from(const TrainedRows* trained) { trained_ = trained; }

  // The distinct ids that are neither current nor held, now stamped as current; valid until the
  // next call. Throws kRowOutOfRange naming table, id and rows, and stamps nothing then.
  template <typename Id>
  std::span<const int64_t> take_missing(std::span<const Id> ids);
  // Rows that have come for keys[i], which stand at begin + positions[i] of what the last
  // take_missing() gave.
  void take_in(size_t begin, std::span<const int64_t> keys, std::span<const uint32_t> positions,
               const float* rows);
  // out row i = the row of ids[i], which the last take_missing() was given and which have come.
  template <typename Id>
  void gather(std::span<const Id> ids, float* out) const;
  // The values of a row if they are current or held, else null. Valid until the next call.
  const float* find_row(int64_t key) const;
  // Whether that finds any of a remote table, or what the trainer steps by itself.
  bool has_values() const { return trained_ != nullptr || places_->rows() > 0; }
  // The same for a lookup that keeps nothing: what the trainer steps by itself, too.
  const float* find_value(int64_t key) const;
  // After a lookup: values of a remote table that are not held go if there are too many.
  void keep_budget();
  // Those of the distinct `keys` whose values are to be pulled to be read as they are; stamps
  // nothing, so that a gradient may name no more rows than before. `anew`: all of them.
  std::vector<int64_t> stale(std::span<const int64_t> keys, bool anew) const;
  // Rows that were held and are current since the last call.
  uint64_t take_hits() { return std::exchange(hits_, 0); }

  // ---- rows of batches to come ----
  template <typename Id>
  void check_ids(std::span<const Id> ids) const;  // throws kRowOutOfRange
  // Adds the ids, which are rows of the table, to the distinct `keys`, and those of them that are
  // to be pulled, or all of them if `anew`, to `pulled`. What is not current is pending then.
  template <typename Id>
  void take_coming(std::span<const Id> ids, bool anew, std::vector<int64_t>* keys,
                   std::vector<int64_t>* pulled);
  // Marks the ids that are pending as wanted; returns how many there are.
  template <typename Id>
  size_t want(std::span<const Id> ids);
  template <typename Id>
  void give_up_wanted(std::span<const Id> ids);  // they have to be pulled
  bool wants_any(std::span<const int64_t> keys) const;
  // Writes the rows that are pending or wanted; they are held then.
  void place(std::span<const int64_t> keys, const float* rows);
  bool all_current(std::span<const int64_t> keys) const;
  // At the end of a round: keep() those whose values are in the weight, drop() the others, make all
  // rows stale, then hold() what was kept.
  void keep(std::span<const int64_t> keys);
  void hold(std::span<const int64_t> keys);
  void await(std::span<const int64_t> keys);  // they are pending, current or not
  void drop(std::span<const int64_t> keys);   // neither pending nor held
  // Adds those that are not there to the distinct `keys`.
  void unite(std::span<const int64_t> more, std::vector<int64_t>* keys);
  void overwrite(std::span<const int64_t> keys, const float* rows);

  void forget(std::span<const int64_t> keys);  // their pull failed
  void refresh();                              // every row is stale for lookups
  void invalidate();                           // and for gradients
  // The trainer has stored rows. What it steps by itself is what it was, and so is its gradient.
  void note_stored() { trained_ == nullptr ? invalidate() : refresh(); }
  // Gives the memory back. Whoever asks for rows then gets kClosed; the rest does nothing.
  void release();
  void require_marks() const;  // throws kClosed after it
  // Beside the weight.
  size_t memory_bytes() const;
  // Deduplicates the keys of a gradient: unique[inverse[i]] == keys[i], numbered by first
  // appearance; room for keys.size() in both. Returns the number of distinct keys. Throws
  // kRowOutOfRange, kUnpulledRow.
  size_t take_pulled(std::span<const int64_t> keys, int64_t* unique, uint32_t* inverse);

 private:
  static constexpr uint32_t kPending = 0xffffffffu;
  static constexpr uint32_t kWanted = 0xfffffffeu;  // pending, and a lookup waits for it
  static constexpr uint32_t kHeld = 0xfffffffdu;
  static constexpr uint32_t kKept = 0xfffffffcu;  // within the end of a round

  using Place = RowPlaces::Place;

  static bool is_coming(const Place& place) { return place.mark.stamp >= kKept; }
  void raise_generation();
  template <typename Id>
  std::span<const Id> marked(std::span<const Id> keys) const {
    return released_ ? std::span<const Id>() : keys;
  }
  // The mark of a row, made if there was none; and null instead.
  RowMark& mark(int64_t key) {
    return remote_ ? places_->take(key).mark : marks_[static_cast<size_t>(key)];
  }
  RowMark* find_mark(int64_t key) {
    if (!remote_) return &marks_[static_cast<size_t>(key)];
    Place* const place = places_->find(key);
    return place == nullptr ? nullptr : &place->mark;
  }
  const RowMark* find_mark(int64_t key) const {
    return const_cast<TableCache*>(this)->find_mark(key);
  }
  // Where the values of a row go.
  float* own_row(int64_t key);
  template <typename Id>
  std::span<const int64_t> take_missing_places(std::span<const Id> ids);
  // Fills those of the first `count` missing rows that the trainer steps by itself; returns how
  // many are left, which are the first ones then.
  size_t fill_trained(size_t count);
  template <typename Marks>
  size_t take_pulled_from(const Marks& marks, std::span<const int64_t> keys, int64_t* unique,
                          uint32_t* inverse);
  void count_values();
  [[noreturn]] void refuse_id(int64_t id) const;
  [[noreturn]] void refuse_unpulled(int64_t id) const;

  wire::TableSpec spec_;
  const bool remote_;
  float* weight_ = nullptr;
  bool bound_ = false;
  bool released_ = false;
  kernels::AlignedBuffer<RowMark> marks_;  // of a static table
  std::unique_ptr<RowPlaces> places_;      // of a remote one
  const TrainedRows* trained_ = nullptr;
  CacheBudget* const budget_;
  uint64_t counted_bytes_ = 0;
  bool has_coming_ = false;           // some places may be of rows to come
  std::vector<float*> looked_up_;     // of a remote one, by id of the last lookup
  std::vector<float*> missing_rows_;  // and by missing key
  uint32_t generation_;
  uint32_t floor_;
  std::vector<int64_t> missing_;
  uint64_t hits_ = 0;
  KeySplit split_;
};

}  // namespace cpudist::client
