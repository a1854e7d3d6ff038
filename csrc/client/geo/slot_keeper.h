// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Which rows of remote tables a trainer that steps by itself has here.
//
// A row of a remote table has a slot from its first update here on. Beyond a budget slots are given
// up, the longest untouched first, once the servers have all that their rows have moved: what they
// lack goes with an exchange, and the slot when that is over and nothing has touched it since. So
// no push of a row is on its way when a lookup asks the servers for it again.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "client/geo/table.h"
#include "client/param_set.h"
#include "client/push/step.h"

namespace cpudist::client {

// Slots of a remote table, as a snapshot has them: keys, counts of updates, and state by row.
struct SlotArrays {
  int64_t* keys = nullptr;
  uint32_t* counts = nullptr;
  float* state = nullptr;  // [rows, state elements]; null if the rule has none
};

// While it lives, lookups of remote tables find what is here. What it says of one table throws
// kInvalidArgument for a static one.
//
// Thread safety: one caller at a time, the training thread. Lookups of any thread read slots: it
// writes those under the mutex of the table's cache, and never waits for a server meanwhile.
class SlotKeeper {
 public:
  // `tables`: all of the set; both outlive it. `alone`: there is nobody to exchange rows with.
  // `cache_bytes`: what slots may take.
  SlotKeeper(ParamSet& set, std::vector<GeoTable>& tables, bool alone, uint64_t cache_bytes);
  ~SlotKeeper();
  SlotKeeper(const SlotKeeper&) = delete;
  SlotKeeper& operator=(const SlotKeeper&) = delete;

  // Keeps lookups of a remote table out; nothing of a static one.
  std::unique_lock<std::mutex> lock(uint32_t index);
  // One step on rows of a remote table, by this trainer. Throws kUnpulledRow before it changes
  // anything.
  void update(const TableGradient& gradient, const kernels::OptimizerConfig& config, int64_t step);
  // What lookups have brought counts no more, for gradients neither.
  void forget_lookups();

  // ---- nothing is under way ----
  // Slots take the servers' values. Where it throws some have.
  void refresh();
  // Servers take the values of all slots, of a trainer that is alone.
  void store();
  // Of a trainer that is alone: the next interval. Where slots take too much, servers take the
  // values of those that were touched longest ago, and these are given up.
  void keep_budget();
  uint64_t count(uint32_t index);
  // To arrays of so many rows; and the same from such arrays, in the place of all slots that there
  // are, with the servers' values.
  void read(uint32_t index, const SlotArrays& to);
  void write(uint32_t index, uint64_t rows, const SlotArrays& from);

  // ---- with an exchange ----
  // Which slots are to be given up so that the budget is kept. Those that the servers lack nothing
  // of go at once, if there are others to exchange with.
  void choose_retired();
  void keep_all();  // none is
  bool retires() const;
  // Of a table, those whose rows the servers lack something of.
  const std::vector<int64_t>& retired(uint32_t index) const { return retired_[index]; }
  void free_retired();  // those that nothing has touched since

  uint64_t size_bytes() const;                             // as the budget counts them
  uint64_t retired_rows() const { return retired_rows_; }  // whose slots were given up for it

 private:
  // Throws kInvalidArgument for a table that is not remote.
  GeoSlots& slots(uint32_t index);
  void store_rows(uint32_t index, std::span<const int64_t> keys);

  ParamSet& owner_;
  SetState& set_;  // of the owner
  std::vector<GeoTable>& tables_;
  const bool alone_;
  const uint64_t cache_bytes_;
  std::vector<std::vector<int64_t>> retired_;  // by table, until their exchange is over
  uint64_t retired_rows_ = 0;
};

}  // namespace cpudist::client
