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
#include <vector>

#include "core/messages.h"
#include "kernels/aligned.h"
#include "kernels/partition.h"

namespace cpudist::core {

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
class TableCache {
 public:
  TableCache(const TableSpec& spec, uint64_t salt, std::span<const uint16_t> owners,
             uint32_t server_count);

  std::mutex mutex;
  const TableSpec& spec() const { return spec_; }
  float* weight() const { return weight_; }
  void bind(float* weight);  // forgets every row
  KeySplit& split() { return split_; }

  // The distinct ids that are not current, now stamped as current; valid until the next call.
  // Throws kRowOutOfRange naming table, id and rows, and stamps nothing then.
  template <typename Id>
  std::span<const int64_t> take_missing(std::span<const Id> ids);
  void forget(std::span<const int64_t> keys);  // their pull failed
  void refresh();                              // every row is stale for lookups
  void invalidate();                           // and for gradients
  // Throws kRowOutOfRange or kUnpulledRow.
  void check_pulled(std::span<const int64_t> keys) const;

 private:
  void raise_generation();
  [[noreturn]] void refuse_id(int64_t id) const;

  TableSpec spec_;
  float* weight_ = nullptr;
  kernels::AlignedBuffer<uint32_t> stamps_;
  uint32_t generation_ = 1;
  uint32_t floor_ = 1;
  std::vector<int64_t> missing_;
  KeySplit split_;
};

}  // namespace cpudist::core
