// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/slabs.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

namespace cpudist::table {
namespace {

constexpr uint64_t kSlabBytes = 4ull << 20;
constexpr uint64_t kMostOrders = 8;

uint32_t capacity(uint64_t stride, uint64_t likely) {
  return static_cast<uint32_t>(std::max<uint64_t>(2, std::min(kSlabBytes / stride, likely)));
}

}  // namespace

Slabs::Slabs(uint64_t stride, uint64_t likely, std::shared_ptr<MemoryAhead> ahead,
             MemoryCap::Kept* kept)
    : stride_(stride),
      per_slab_(capacity(stride, likely)),
      reciprocal_(std::numeric_limits<uint64_t>::max() / per_slab_ + 1),
      likely_slabs_((likely + per_slab_ - 1) / per_slab_),
      ahead_(std::move(ahead)),
      kept_(kept) {}

void Slabs::extend(uint64_t record) {
  while (record >= covered_) {
    starts_.reserve(starts_.size() + 1);
    const size_t size_bytes = kernels::checked_size_bytes(per_slab_, stride_);
    if (orders_.empty()) {
      slabs_.emplace_back(size_bytes);
      kept_->add(size_bytes);
    } else {
      slabs_.reserve(slabs_.size() + 1);
      const MemoryAhead::OrderPtr order = ahead_->next_of(&orders_);
      kept_->sub(size_bytes);  // until it is there
      slabs_.push_back(ahead_->take(order));
      kept_->add(size_bytes);
    }
    starts_.push_back(slabs_.back().data());
    covered_ += per_slab_;
    order_at_ = covered_ - per_slab_ / 2;
  }
  if (record < order_at_) return;
  order_at_ = covered_;
  order_up_to(slabs_.size() + 1);
}

uint64_t Slabs::give_up_ahead() noexcept {
  const uint64_t freed = orders_.size() * slab_bytes();
  orders_.clear();
  kept_->sub(freed);
  return freed;
}

void Slabs::order_up_to(uint64_t slabs) {
  if (ahead_ == nullptr) return;
  const uint64_t wanted = std::min({slabs, likely_slabs_, slabs_.size() + kMostOrders});
  try {
    while (slabs_.size() + orders_.size() < wanted) {
      const size_t size_bytes = kernels::checked_size_bytes(per_slab_, stride_);
      if (!kept_->has_room(size_bytes)) return;
      auto order = ahead_->order(size_bytes);
      if (order == nullptr) return;
      orders_.push_back(std::move(order));
      kept_->add(size_bytes);
    }
  } catch (const std::bad_alloc&) {
    // It spares time only: the slab is made when it is needed, or that fails.
  }
}

}  // namespace cpudist::table
