// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The memory that a snapshot takes for rows which change before they are written, bounded.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "base/memory_cap.h"
#include "base/wait.h"

namespace cpudist::table {

// Thread safety: all members.
class ImageMemory {
 public:
  enum class Failure : uint32_t {
    kNone = 0,
    kLimit = 1,    // more rows changed than the limit has room for
    kMemory = 2,   // the system has no memory
    kDropped = 3,  // rows were dropped before they were written
    kCap = 4,      // the server needs its memory for something else
  };

  // `cap` counts it, too; may be null.
  explicit ImageMemory(uint64_t limit_bytes, std::shared_ptr<MemoryCap> cap = nullptr)
      : limit_bytes_(limit_bytes), cap_(std::move(cap)) {}

  // Counts what is about to be allocated. False, and the snapshot has failed, beyond the limit or
  // the cap.
  bool take(uint64_t size_bytes) noexcept;
  void give_back(uint64_t size_bytes) noexcept;
  // The snapshot cannot be whole any more. The first cause counts.
  void fail(Failure cause) noexcept;
  Failure failure() const noexcept { return failure_.load(); }
  // For the next snapshot: all of the last one's was given back.
  void reset() noexcept { failure_ = Failure::kNone; }

  // Much of the memory is left, or nothing is kept any more: rows may be changed.
  bool has_room() const {
    return used_.load() <= limit_bytes_ / 4 * 3 || failure_.load() != Failure::kNone;
  }
  // For whoever is about to change rows, and holds no lock: returns once there is room, at the
  // latest then.
  void wait_for_room(TimePoint latest);

  uint64_t limit_bytes() const { return limit_bytes_; }
  uint64_t used_bytes() const { return used_.load(); }
  uint64_t waits() const { return waits_.load(); }  // how often somebody had to, ever
  const std::shared_ptr<MemoryCap>& cap() const { return cap_; }

 private:
  const uint64_t limit_bytes_;
  const std::shared_ptr<MemoryCap> cap_;
  std::atomic<uint64_t> used_{0};
  std::atomic<uint64_t> waits_{0};
  std::atomic<Failure> failure_{Failure::kNone};
  std::mutex mutex_;
  ConditionVariable room_;
};

}  // namespace cpudist::table
