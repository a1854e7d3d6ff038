// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a trainer that steps by itself has of a remote table: a slot for each row that it has
// stepped, with the row's values, optimizer state, count of updates, shadow, and when it was
// touched last.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "client/cache/row_places.h"
#include "client/cache/trained_rows.h"
#include "kernels/optimizers.h"

namespace cpudist::client {

// Thread safety: one caller changes it at a time, and holds the mutex of the table's cache while it
// adds, frees or writes: lookups of other threads read then. It may read without.
class GeoSlots final : public TrainedRows {
 public:
  using Slot = RowPlaces::Place;

  // `rule`: the trainer's own. `shadows`: whether there is anybody to exchange rows with.
  GeoSlots(uint32_t dim, const kernels::OptimizerConfig& rule, bool shadows);

  const float* find_trained(int64_t key) const override;
  Slot* find(int64_t key) { return places_.find(key); }
  float* weight(const Slot& slot) { return places_.values(slot); }
  float* state(const Slot& slot) { return places_.values(slot) + dim_; }
  float* shadow(const Slot& slot) {
    return shadows_ ? places_.values(slot) + dim_ + state_elements_ : nullptr;
  }
  uint32_t count(const Slot& slot) {
    uint32_t updates;
    std::memcpy(&updates, places_.values(slot) + floats_ - 1, sizeof(updates));
    return updates;
  }
  void set_count(const Slot& slot, uint32_t updates) {
    std::memcpy(places_.values(slot) + floats_ - 1, &updates, sizeof(updates));
  }
  // The interval in which it was touched last, 0: in none that is remembered.
  static uint32_t touched(const Slot& slot) { return slot.mark.stamp; }
  static void touch(Slot& slot, uint32_t interval) { slot.mark.stamp = interval; }

  // A slot for each of the distinct keys, which have none, with these values, [keys, dim], and the
  // state of a row that had no update. Where memory runs out there are none of them.
  void add(std::span<const int64_t> keys, const float* rows);
  // What stands there was never moved, or the servers have all of it.
  bool has_residue(const Slot& slot);
  // All without a residue that `goes` is true of. Others may move. Returns how many went.
  template <typename Goes>
  uint64_t free_if(const Goes& goes);
  void clear() { places_.clear(); }
  template <typename Use>
  void each(const Use& use) {
    places_.each_place(use);
  }
  std::vector<int64_t> keys();

  uint64_t size() const { return places_.size(); }
  uint32_t state_elements() const { return state_elements_; }
  // What a budget counts of one: its values, and its share of places at most half full.
  uint64_t slot_bytes() const { return floats_ * sizeof(float) + 2 * sizeof(Slot); }
  uint64_t memory_bytes() const { return places_.memory_bytes(); }

 private:
  uint32_t dim_;
  kernels::OptimizerConfig rule_;
  bool shadows_;
  uint32_t state_elements_;
  uint32_t floats_;  // of one slot: values, state, shadow, count
  RowPlaces places_;
};

template <typename Goes>
uint64_t GeoSlots::free_if(const Goes& goes) {
  const size_t before = places_.size();
  places_.retain([&](const Slot& slot) { return !goes(slot) || has_residue(slot); });
  return before - places_.size();
}

}  // namespace cpudist::client
