// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/batch_pool.h"

#include <algorithm>
#include <utility>

namespace cpudist::data {

void BatchPool::keep_bytes(size_t limit_bytes) {
  if (guard_.forked()) return;
  const std::lock_guard lock(mutex_);
  limit_bytes_ = std::max(limit_bytes_, limit_bytes);
}

std::shared_ptr<Batch> BatchPool::take() {
  std::unique_ptr<Batch> batch;
  if (!guard_.forked()) {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      batch = std::move(idle_.back());  // the one used last, which may still be in a cache
      idle_.pop_back();
      idle_bytes_ -= batch->capacity_bytes();
    }
  }
  if (!batch) batch = std::make_unique<Batch>();
  return {batch.release(), [pool = shared_from_this()](Batch* done) {
            pool->give_back(std::unique_ptr<Batch>(done));
          }};
}

size_t BatchPool::idle_bytes() const {
  const std::lock_guard lock(mutex_);
  return idle_bytes_;
}

void BatchPool::give_back(std::unique_ptr<Batch> batch) noexcept {
  if (guard_.forked()) return;
  const size_t size = batch->capacity_bytes();
  const std::lock_guard lock(mutex_);
  if (idle_bytes_ + size > limit_bytes_) return;
  try {
    idle_.push_back(std::move(batch));
    idle_bytes_ += size;
  } catch (const std::bad_alloc&) {
    // Then it is freed: nothing is lost.
  }
}

void BatchPool::keep_buffers(size_t count) {
  if (guard_.forked()) return;
  const std::lock_guard lock(mutex_);
  buffers_.reserve(count);
}

RecordBuffer BatchPool::take_buffer() {
  if (guard_.forked()) return {};
  const std::lock_guard lock(mutex_);
  if (buffers_.empty()) return {};
  RecordBuffer buffer = std::move(buffers_.back());
  buffers_.pop_back();
  return buffer;
}

void BatchPool::give_back(RecordBuffer buffer) noexcept {
  if (guard_.forked()) return;
  const std::lock_guard lock(mutex_);
  if (buffers_.size() < buffers_.capacity()) buffers_.push_back(std::move(buffer));
}

}  // namespace cpudist::data
