// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The memory that a snapshot takes for rows which change before they are written, bounded.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

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
  };

  explicit ImageMemory(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Counts what is about to be allocated. False, and the snapshot has failed, beyond the limit.
  bool take(uint64_t size_bytes) noexcept;
  void give_back(uint64_t size_bytes) noexcept;
  // The snapshot cannot be whole any more. The first cause counts.
  void fail(Failure cause) noexcept;
  Failure failure() const noexcept { return failure_.load(); }
  // For the next snapshot: all of the last one's was given back.
  void reset() noexcept { failure_ = Failure::kNone; }

  // For whoever is about to change rows, and holds no lock: while little of the memory is left,
  // waits until there is more, the snapshot has failed, or `longest` has passed.
  void wait_for_room(Clock::duration longest);

  uint64_t limit_bytes() const { return limit_bytes_; }
  uint64_t used_bytes() const { return used_.load(); }
  uint64_t waits() const { return waits_.load(); }  // how often somebody had to, ever

 private:
  bool has_room() const {
    return used_.load() <= limit_bytes_ / 4 * 3 || failure_.load() != Failure::kNone;
  }

  const uint64_t limit_bytes_;
  std::atomic<uint64_t> used_{0};
  std::atomic<uint64_t> waits_{0};
  std::atomic<Failure> failure_{Failure::kNone};
  std::mutex mutex_;
  ConditionVariable room_;
};

}  // namespace cpudist::table
