// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/snapshot/gone_keys.h"

#include <algorithm>
#include <new>

namespace cpudist::server {

uint64_t GoneKeys::mark() {
  const std::lock_guard lock(mutex_);
  // A part that has nothing yet begins at this mark just as well, but cuts have marks of their own.
  parts_.push_back(std::make_shared<Keys>());
  return first_ + parts_.size() - 1;
}

void GoneKeys::add(std::span<const table::Freed> freed) noexcept {
  const std::lock_guard lock(mutex_);
  if (parts_.empty() || freed.empty()) return;
  Keys& keys = *parts_.back();
  const size_t wanted = keys.size() + freed.size();
  if (wanted > keys.capacity() && !make_room(wanted)) return drop_all();
  for (const table::Freed& one : freed) keys.push_back(one.key);
}

bool GoneKeys::make_room(size_t wanted) noexcept {
  Keys& keys = *parts_.back();
  const uint64_t before = bytes_of(keys);
  // All that the bound leaves to it.
  const uint64_t most = (most_bytes_ - (size_bytes_ - before)) / sizeof(int64_t);
  if (wanted > most) return false;
  try {
    keys.reserve(std::min<uint64_t>(std::max(wanted, 2 * keys.size()), most));
  } catch (const std::bad_alloc&) {
    return false;
  }
  size_bytes_ += bytes_of(keys) - before;
  kept_.add(bytes_of(keys) - before);
  return true;
}

bool GoneKeys::knows(uint64_t mark) const noexcept {
  const std::lock_guard lock(mutex_);
  return mark >= first_ && mark - first_ < parts_.size();
}

std::vector<GoneKeys::Part> GoneKeys::since(uint64_t mark) const {
  const std::lock_guard lock(mutex_);
  const auto begin = parts_.begin() + static_cast<std::ptrdiff_t>(mark - first_);
  return {begin, parts_.end() - 1};
}

void GoneKeys::trim(uint64_t mark) noexcept {
  const std::lock_guard lock(mutex_);
  while (!parts_.empty() && first_ < mark) drop_first();
}

void GoneKeys::drop() noexcept {
  const std::lock_guard lock(mutex_);
  drop_all();
}

void GoneKeys::drop_first() noexcept {
  const uint64_t size_bytes = bytes_of(*parts_.front());
  size_bytes_ -= size_bytes;
  kept_.sub(size_bytes);
  parts_.pop_front();
  ++first_;
}

void GoneKeys::drop_all() noexcept {
  while (!parts_.empty()) drop_first();
}

uint64_t GoneKeys::size_bytes() const {
  const std::lock_guard lock(mutex_);
  return size_bytes_;
}

}  // namespace cpudist::server
