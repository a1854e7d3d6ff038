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
  const uint64_t more = freed.size() * sizeof(int64_t);
  if (size_bytes_ + more > most_bytes_) return drop_all();
  try {
    Keys& keys = *parts_.back();
    keys.reserve(keys.size() + freed.size() > keys.capacity()
                     ? std::max(keys.size() + freed.size(), 2 * keys.size())
                     : 0);
    for (const table::Freed& one : freed) keys.push_back(one.key);
  } catch (const std::bad_alloc&) {
    return drop_all();
  }
  size_bytes_ += more;
  kept_.add(more);
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
  const uint64_t size_bytes = parts_.front()->size() * sizeof(int64_t);
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
