// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/image_memory.h"

namespace cpudist::table {

void ImageRoom::tell() noexcept {
  {
    const std::lock_guard lock(mutex_);
  }  // nobody is between looking and waiting
  room_.notify_all();
}

void ImageRoom::wait_for_room(TimePoint latest) {
  if (has_room()) return;
  waits_.fetch_add(1);
  std::unique_lock lock(mutex_);
  room_.wait_until(lock, latest, [this] { return has_room(); });
}

bool ImageMemory::take(uint64_t size_bytes) noexcept {
  ImageRoom& room = *room_;
  const bool within = room.used_.fetch_add(size_bytes) + size_bytes <= room.limit_bytes_;
  if (within && (room.cap_ == nullptr || room.cap_->lend(size_bytes))) return true;
  room.used_.fetch_sub(size_bytes);
  fail(within ? Failure::kCap : Failure::kLimit);
  return false;
}

void ImageMemory::give_back(uint64_t size_bytes) noexcept {
  const bool had_room = room_->has_room();
  room_->used_.fetch_sub(size_bytes);
  if (room_->cap_ != nullptr) room_->cap_->give_back(size_bytes);
  if (!had_room && room_->has_room()) room_->tell();
}

void ImageMemory::fail(Failure cause) noexcept {
  Failure none = Failure::kNone;
  if (failure_.compare_exchange_strong(none, cause)) leave();
}

void ImageMemory::leave() noexcept {
  if (left_.exchange(true)) return;
  if (room_->keeping_.fetch_sub(1) == 1) room_->tell();
}

}  // namespace cpudist::table
