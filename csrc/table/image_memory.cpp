// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/image_memory.h"

namespace cpudist::table {

bool ImageMemory::take(uint64_t size_bytes) noexcept {
  const bool within = used_.fetch_add(size_bytes) + size_bytes <= limit_bytes_;
  if (within && (cap_ == nullptr || cap_->lend(size_bytes))) return true;
  used_.fetch_sub(size_bytes);
  fail(within ? Failure::kCap : Failure::kLimit);
  return false;
}

void ImageMemory::give_back(uint64_t size_bytes) noexcept {
  const bool had_room = has_room();
  used_.fetch_sub(size_bytes);
  if (cap_ != nullptr) cap_->give_back(size_bytes);
  if (had_room || !has_room()) return;
  {
    const std::lock_guard lock(mutex_);
  }  // nobody is between looking and waiting
  room_.notify_all();
}

void ImageMemory::fail(Failure cause) noexcept {
  Failure none = Failure::kNone;
  if (!failure_.compare_exchange_strong(none, cause)) return;
  {
    const std::lock_guard lock(mutex_);
  }
  room_.notify_all();
}

void ImageMemory::wait_for_room(TimePoint latest) {
  if (has_room()) return;
  waits_.fetch_add(1);
  std::unique_lock lock(mutex_);
  room_.wait_until(lock, latest, [this] { return has_room(); });
}

}  // namespace cpudist::table
