// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A block of a dense parameter on the server that owns it: weight, optimizer state, average if one
// is kept, and the number of updates, in float32 or float64.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "base/memory_cap.h"
#include "kernels/aligned.h"
#include "kernels/optimizers.h"
#include "table/average.h"
#include "table/image_memory.h"
#include "wire/layout.h"
#include "wire/rows.h"

namespace cpudist::table {

// What a block was at a cut.
struct BlockImage {
  uint64_t updates = 0;                   // of the set, that its average is after
  std::shared_ptr<ImageMemory> memory{};  // told where there is none for the values
  std::unique_ptr<uint8_t[]> values{};    // weight, state, average; null until they are kept
};

// Thread safety: const members from any number of threads, the others exclusively.
class DenseBlock {
 public:
  // `cap` counts planned_bytes() as long as it lives.
  DenseBlock(uint32_t id, wire::BlockSpec spec, const kernels::OptimizerConfig& config,
             Averaging averaging = {}, std::shared_ptr<MemoryCap> cap = nullptr);

  uint32_t id() const { return id_; }
  const wire::BlockSpec& spec() const { return spec_; }
  uint64_t step() const { return step_; }
  bool stored() const { return stored_; }  // memory is taken by the first store
  std::span<const uint8_t> weight() const { return weight_.span(); }
  std::span<const uint8_t> state() const { return state_.span(); }
  uint64_t planned_bytes() const;  // size_bytes() once it is stored
  uint64_t size_bytes() const { return weight_.size() + state_.size() + average_.size(); }

  // Throws kInvalidArgument if the sizes do not fit.
  void check(const wire::BlockValues& values) const;
  // Throws as check does, before anything is changed. An average among them is as after `updates`
  // of the set; without one it begins at the value.
  void store(const wire::BlockValues& values, uint64_t updates = 0);
  // Of `before` updates of the set `after` are made, with no update of the block.
  void renumber(uint64_t before, uint64_t after);
  // Update number `round` of the set, counted from 0, from a gradient of spec().elements values of
  // spec().dtype, 8-byte aligned.
  void update(const kernels::OptimizerConfig& config, const void* gradient, uint64_t round);

  // ---- as snapshots have them ----
  // So many bytes are in an image.
  uint64_t image_bytes() const;
  // From now on it is kept in `image` as it is now, before it changes.
  void freeze(std::shared_ptr<BlockImage> image) noexcept { image_ = std::move(image); }
  // Keeps it now, unless it was kept since. From one thread, while others use const members.
  void keep() noexcept;
  void thaw() noexcept { image_.reset(); }

  // The average after `updates` of the set, weight().size() bytes. Only where one is kept.
  void read_average(uint64_t updates, uint8_t* out) const;

 private:
  template <typename T>
  void init_state();
  // average = weight + kept * (average - weight), written to `out`, which may be the average.
  void draw_average_to(uint8_t* out, double kept) const;
  template <typename T>
  void update_as(const kernels::OptimizerConfig& config, const T* gradient);

  uint32_t id_;
  wire::BlockSpec spec_;
  kernels::OptimizerConfig config_;
  uint64_t step_ = 0;
  bool stored_ = false;
  kernels::AlignedBuffer<uint8_t> weight_;
  kernels::AlignedBuffer<uint8_t> state_;
  Averaging averaging_;
  kernels::AlignedBuffer<uint8_t> average_;
  std::unique_ptr<MemoryCap::Kept> kept_;
  std::shared_ptr<BlockImage> image_;  // of a cut, until it is kept
  uint64_t averaged_ = 0;              // updates of the set that are in the average
};

}  // namespace cpudist::table
