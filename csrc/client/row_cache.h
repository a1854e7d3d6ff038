// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The trainer's copy of one table: which rows of the bound weight are current, and what a lookup
// has to ask the servers for.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

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
class TableCache {
 public:
  TableCache(const wire::TableSpec& spec, uint64_t salt, std::span<const uint16_t> owners,
             uint32_t server_count);

  std::mutex mutex;
  const wire::TableSpec& spec() const { return spec_; }
  float* weight() const { return weight_; }
  void bind(float* weight);              // forgets every row
  bool bound() const { return bound_; }  // the weight of a table without rows is null
  KeySplit& split() { return split_; }

  // The distinct ids that are neither current nor held, now stamped as current; valid until the
  // next call. Throws kRowOutOfRange naming table, id and rows, and stamps nothing then.
  template <typename Id>
  std::span<const int64_t> take_missing(std::span<const Id> ids);
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
  // Gives the memory back. Whoever asks for rows then gets kClosed; the rest does nothing.
  void release();
  size_t marks_bytes() const { return marks_.size() * sizeof(RowMark); }
  // Deduplicates the keys of a gradient: unique[inverse[i]] == keys[i], numbered by first
  // appearance; room for keys.size() in both. Returns the number of distinct keys. Throws
  // kRowOutOfRange, kUnpulledRow.
  size_t take_pulled(std::span<const int64_t> keys, int64_t* unique, uint32_t* inverse);

 private:
  static constexpr uint32_t kPending = 0xffffffffu;
  static constexpr uint32_t kWanted = 0xfffffffeu;  // pending, and a lookup waits for it
  static constexpr uint32_t kHeld = 0xfffffffdu;
  static constexpr uint32_t kKept = 0xfffffffcu;  // within the end of a round

  void raise_generation();
  void require_marks() const;  // throws kClosed
  template <typename Id>
  std::span<const Id> marked(std::span<const Id> keys) const {
    return released_ ? std::span<const Id>() : keys;
  }
  [[noreturn]] void refuse_id(int64_t id) const;
  [[noreturn]] void refuse_unpulled(int64_t id) const;

  // `place` is where a key stands among the distinct keys of a gradient, if it stands there: a
  // place left over from an earlier gradient names another key or none.
  struct RowMark {
    uint32_t stamp;
    uint32_t place;
  };

  wire::TableSpec spec_;
  float* weight_ = nullptr;
  bool bound_ = false;
  bool released_ = false;
  kernels::AlignedBuffer<RowMark> marks_;
  uint32_t generation_ = 1;
  uint32_t floor_ = 1;
  std::vector<int64_t> missing_;
  uint64_t hits_ = 0;
  KeySplit split_;
};

}  // namespace cpudist::client
