// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A table that its trainer updates by itself: the fused update of touched rows, which rows were
// touched since the last exchange, and a shadow of every row that was ever touched.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/aligned.h"
#include "kernels/optimizers.h"
#include "wire/messages.h"

namespace cpudist::client {

// Memory of the trainer's that an update of rows writes to.
struct LocalRows {
  float* weight = nullptr;     // [rows, dim]
  float* state = nullptr;      // [rows, state elements]; null if the optimizer has none
  uint32_t* counts = nullptr;  // [rows], updates of each row
};

// Thread safety: one caller at a time.
class GeoTable {
 public:
  // `tracks`: whether there is anybody to exchange rows with.
  GeoTable(const wire::TableSpec& spec, uint64_t salt, std::span<const uint16_t> owners,
           uint32_t server_count, bool tracks);

  const wire::TableSpec& spec() const { return spec_; }

  // One step on the rows of a COO gradient, duplicates summed in order. `step` counts the table's
  // updates, this one included. Throws kRowOutOfRange before anything is changed. Returns the
  // number of distinct rows.
  uint64_t update(const LocalRows& rows, const kernels::OptimizerConfig& config, int64_t step,
                  std::span<const int64_t> keys, const float* gradients);

  // The rows touched in this interval, by server that owns them.
  const std::vector<std::vector<int64_t>>& touched() const { return touched_; }
  // Memory for so many of one server; see put_back().
  void make_room(uint32_t server, size_t rows) { touched_[server].reserve(rows); }
  // Begins the next interval, in which no row is touched yet.
  void next_interval() noexcept;
  // Rows of the last interval that count for this one: needs room for them, and no row of this
  // server is touched yet.
  void put_back(uint32_t server, std::span<const int64_t> keys) noexcept;
  // All rows with a shadow, by server.
  std::vector<std::vector<int64_t>> shadowed() const;
  float* shadow(int64_t key);  // null: the row is as it was when last received
  void forget_shadows();       // rows are as the servers hold them

  uint64_t shadow_rows() const { return shadow_rows_; }
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
  void note_touched(const float* weight, size_t count);
  void add_shadow(RowMark& mark, const float* row);
  float* shadow_at(uint32_t number) {
    const uint32_t at = number - 1;
    return slabs_[at / kSlabRows].data() + size_t{at % kSlabRows} * spec_.dim;
  }
  uint32_t owner_of(int64_t key) const;

  wire::TableSpec spec_;
  uint64_t salt_;
  std::span<const uint16_t> owners_;
  bool tracks_;
  uint32_t interval_ = 1;
  uint64_t shadow_rows_ = 0;
  kernels::AlignedBuffer<RowMark> marks_;
  std::vector<std::vector<int64_t>> touched_;  // by server
  std::vector<kernels::AlignedBuffer<float>> slabs_;
  // Scratch of one update.
  std::vector<int64_t> unique_;
  std::vector<uint32_t> inverse_;
  std::vector<float> sums_;
  std::vector<float*> weights_;
  std::vector<float*> states_;
  std::vector<const float*> sources_;
};

}  // namespace cpudist::client
