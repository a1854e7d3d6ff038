// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A table that its trainer updates by itself: the fused update of touched rows, which rows were
// touched since the last exchange, and a shadow of every row that was ever touched. Of a remote
// table the rows that were ever touched are all that is here.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/geo/slots.h"
#include "client/row_cache.h"
#include "kernels/aligned.h"
#include "kernels/optimizers.h"
#include "wire/messages.h"

namespace cpudist::client {

// Memory of the trainer's that an update of rows of a static table writes to.
struct LocalRows {
  float* weight = nullptr;     // [rows, dim]
  float* state = nullptr;      // [rows, state elements]; null if the optimizer has none
  uint32_t* counts = nullptr;  // [rows], updates of each row
};

// Thread safety: one caller at a time.
class GeoTable {
 public:
  // `tracks`: whether there is anybody to exchange rows with. `rule`: the trainer's own, needed of
  // a remote table.
  GeoTable(const wire::TableSpec& spec, uint64_t salt, std::span<const uint16_t> owners,
           uint32_t server_count, bool tracks, const kernels::OptimizerConfig* rule = nullptr);

  const wire::TableSpec& spec() const { return spec_; }
  GeoSlots* slots() const { return slots_.get(); }  // of a remote table; else null

  // One step on the rows of a COO gradient, duplicates summed in order. `step` counts the table's
  // updates, this one included. Throws kRowOutOfRange before anything is changed. Returns the
  // number of distinct rows.
  uint64_t update(const LocalRows& rows, const kernels::OptimizerConfig& config, int64_t step,
                  std::span<const int64_t> keys, const float* gradients);

  // The same of a remote table, in two parts. First: which rows the gradient names. Throws as
  // TableCache::take_pulled, before anything is changed; its mutex is held, here and below. Returns
  // the distinct keys that have no slot yet.
  std::vector<int64_t> take_keys(TableCache& cache, std::span<const int64_t> keys);
  // Then, when all have one: the step.
  uint64_t update_slots(const kernels::OptimizerConfig& config, int64_t step,
                        const float* gradients);

  // The rows touched in this interval, by server that owns them.
  const std::vector<std::vector<int64_t>>& touched() const { return touched_; }
  // Memory for so many of one server; see put_back().
  void make_room(uint32_t server, size_t rows) { touched_[server].reserve(rows); }
  // Begins the next interval, in which no row is touched yet.
  void next_interval() noexcept;
  // Rows of the last interval that count for this one: needs room for them, and no row of this
  // server is touched yet.
  void put_back(uint32_t server, std::span<const int64_t> keys) noexcept;
  uint32_t interval() const { return interval_; }
  uint32_t owner_of(int64_t key) const;
  // All rows with a shadow, by server.
  std::vector<std::vector<int64_t>> shadowed() const;
  // Null: the row is as it was when last received, or not here.
  float* shadow(int64_t key);
  // The values of a row; null where it is not here. `weight` is that of a static table.
  float* row(int64_t key, float* weight) {
    if (!slots_) return weight + static_cast<size_t>(key) * spec_.dim;
    const GeoSlots::Slot* const slot = slots_->find(key);
    return slot == nullptr ? nullptr : slots_->weight(*slot);
  }
  void forget_shadows();  // rows are as the servers hold them
  // The rows touched in this interval and, unless `touched_only`, all others that are not as they
  // were when last exchanged; the former, `*touched` of them, come first. `weight` as above.
  std::vector<int64_t> moved(float* weight, bool touched_only, size_t* touched);
  // The row, which is here, is `values` and was `agreed` when last exchanged. `touched`: in this
  // interval.
  void set_moved(int64_t key, float* weight, const float* values, const float* agreed,
                 bool touched);

  uint64_t shadow_rows() const { return slots_ && tracks_ ? slots_->size() : shadow_rows_; }
  uint64_t size_bytes() const;  // of shadows and marks

 private:
  // `place`: as in TableCache. `shadow`: 0 is none. `touched` is the interval of the last touch.
  struct RowMark {
    uint32_t place;
    uint32_t shadow;
    uint32_t touched;
  };
  static constexpr uint32_t kSlabRows = 4096;

  size_t dedupe(std::span<const int64_t> keys);
  void check_size(size_t keys) const;
  void note_touched(const float* weight, size_t count);
  // Sums the gradients of each of the first `count` rows of unique_, and makes room to point at
  // them. Returns the elements of a row's state.
  size_t sum_up(const kernels::OptimizerConfig& config, const float* gradients, size_t count);
  // `updates_` are those of each row, this one included.
  void step_rows(const kernels::OptimizerConfig& config, int64_t step, size_t count);
  void add_shadow(RowMark& mark, const float* row);
  float* shadow_at(uint32_t number) {
    const uint32_t at = number - 1;
    return slabs_[at / kSlabRows].data() + size_t{at % kSlabRows} * spec_.dim;
  }

  wire::TableSpec spec_;
  uint64_t salt_;
  std::span<const uint16_t> owners_;
  bool tracks_;
  uint32_t interval_ = 1;
  uint64_t shadow_rows_ = 0;
  kernels::AlignedBuffer<RowMark> marks_;      // of a static table
  std::unique_ptr<GeoSlots> slots_;            // of a remote one
  std::vector<std::vector<int64_t>> touched_;  // by server
  std::vector<kernels::AlignedBuffer<float>> slabs_;
  // Scratch of one update.
  std::vector<int64_t> unique_;
  std::vector<uint32_t> inverse_;
  size_t unique_count_ = 0;  // of the last take_keys
  std::vector<float> sums_;
  std::vector<uint32_t> updates_;
  std::vector<float*> weights_;
  std::vector<float*> states_;
  std::vector<const float*> sources_;
};

}  // namespace cpudist::client
