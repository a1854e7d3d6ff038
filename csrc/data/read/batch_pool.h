// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Keeps the memory of batches that nobody uses any more for the batches to come.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/process_guard.h"
#include "data/read/batch.h"

namespace cpudist::data {

// Of what is in a batch, not of what it has room for.
inline size_t size_bytes(const Batch& batch) {
  return batch.ints.size() * sizeof(int64_t) + batch.floats.size() * sizeof(float) +
         batch.instance_ids.size() * sizeof(uint64_t);
}

// Any thread. In a forked child, where another thread's lock would never be released, nothing is
// kept. Batches may outlive everything but the pool, which they keep alive.
class BatchPool : public std::enable_shared_from_this<BatchPool> {
 public:
  static std::shared_ptr<BatchPool> create() { return std::shared_ptr<BatchPool>(new BatchPool()); }

  // The pool keeps at most this much idle; the largest that was asked for counts.
  void keep_bytes(size_t limit_bytes);
  // What is in it is of no meaning. When its last owner lets it go, it comes back here.
  std::shared_ptr<Batch> take();
  size_t idle_bytes() const;  // of batches
  // The same for what lanes read records into: `count` of them are kept, or as many as was asked
  // for before.
  void keep_buffers(size_t count);
  RecordBuffer take_buffer();
  void give_back(RecordBuffer buffer) noexcept;

 private:
  BatchPool() = default;
  void give_back(std::unique_ptr<Batch> batch) noexcept;

  const ProcessGuard guard_;
  mutable std::mutex mutex_;
  size_t limit_bytes_ = 0;
  size_t idle_bytes_ = 0;
  std::vector<std::unique_ptr<Batch>> idle_;
  std::vector<RecordBuffer> buffers_;
};

}  // namespace cpudist::data
