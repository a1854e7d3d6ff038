// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "base/memory_cap.h"

#include <algorithm>

namespace cpudist {
namespace {

// What `used` bytes leave of a cap.
uint64_t rest_of(uint64_t cap_bytes, uint64_t used) {
  return cap_bytes - std::min(cap_bytes, used);
}

}  // namespace

std::optional<MemoryCap::Reservation> MemoryCap::reserve(uint64_t size_bytes,
                                                         uint64_t waiting_bytes) {
  auto self = shared_from_this();
  const std::lock_guard lock(mutex_);
  if (cap_bytes_ != 0) {
    const uint64_t room = rest_of(cap_bytes_, kept_);
    if (size_bytes > room) return std::nullopt;
    if (used_ > room - size_bytes && used_ > waiting_bytes) return std::nullopt;
  }
  used_ += size_bytes;
  return Reservation(std::move(self), size_bytes);
}

MemoryCap::Reservation MemoryCap::reserve_anyhow(uint64_t size_bytes) {
  change(&MemoryCap::used_, static_cast<int64_t>(size_bytes));
  return {shared_from_this(), size_bytes};
}

bool MemoryCap::has_room(uint64_t size_bytes) const {
  const std::lock_guard lock(mutex_);
  return cap_bytes_ == 0 || size_bytes <= rest_of(cap_bytes_, used_ + kept_ + lent_ + spare_);
}

bool MemoryCap::lend(uint64_t size_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (cap_bytes_ != 0 && size_bytes > rest_of(cap_bytes_, used_ + kept_ + lent_)) return false;
  lent_ += size_bytes;
  return true;
}

void MemoryCap::Kept::count(uint64_t size_bytes, uint64_t promised_bytes) noexcept {
  const uint64_t before = std::max(promised_bytes_, size_bytes_);
  size_bytes_ = size_bytes;
  promised_bytes_ = promised_bytes;
  const uint64_t after = std::max(promised_bytes_, size_bytes_);
  if (cap_) cap_->change(&MemoryCap::kept_, static_cast<int64_t>(after - before));
}

bool MemoryCap::Kept::has_room(uint64_t size_bytes) const {
  return !cap_ || size_bytes_ + size_bytes <= promised_bytes_ || cap_->has_room(size_bytes);
}

}  // namespace cpudist
