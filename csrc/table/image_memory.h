// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The memory that snapshots take for rows which change before they are written, bounded.
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

// What all snapshots of a server share: the bound, and those who wait for it.
//
// Thread safety: all members.
class ImageRoom {
 public:
  // `cap` counts it, too; may be null.
  explicit ImageRoom(uint64_t limit_bytes, std::shared_ptr<MemoryCap> cap = nullptr)
      : limit_bytes_(limit_bytes), cap_(std::move(cap)) {}

  // Much of the memory is left, or nobody keeps anything any more: rows may be changed.
  bool has_room() const { return used_.load() <= limit_bytes_ / 4 * 3 || keeping_.load() == 0; }
  // For whoever is about to change rows, and holds no lock: returns once there is room, at the
  // latest then.
  void wait_for_room(TimePoint latest);

  uint64_t limit_bytes() const { return limit_bytes_; }
  uint64_t used_bytes() const { return used_.load(); }
  uint64_t waits() const { return waits_.load(); }  // how often somebody had to, ever
  const std::shared_ptr<MemoryCap>& cap() const { return cap_; }

 private:
  friend class ImageMemory;

  void tell() noexcept;  // there may be room now

  const uint64_t limit_bytes_;
  const std::shared_ptr<MemoryCap> cap_;
  std::atomic<uint64_t> used_{0};
  std::atomic<uint64_t> waits_{0};
  std::atomic<uint64_t> keeping_{0};  // snapshots that have not failed
  std::mutex mutex_;
  ConditionVariable room_;
};

// What one snapshot takes of it. One that fails for itself leaves the others as they are.
//
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

  explicit ImageMemory(std::shared_ptr<ImageRoom> room) : room_(std::move(room)) {
    room_->keeping_.fetch_add(1);
  }
  ~ImageMemory() { leave(); }
  ImageMemory(const ImageMemory&) = delete;
  ImageMemory& operator=(const ImageMemory&) = delete;

  // Counts what is about to be allocated. False, and the snapshot has failed, beyond the limit or
  // the cap.
  bool take(uint64_t size_bytes) noexcept;
  void give_back(uint64_t size_bytes) noexcept;
  // The snapshot cannot be whole any more. The first cause counts.
  void fail(Failure cause) noexcept;
  Failure failure() const noexcept { return failure_.load(); }

  uint64_t limit_bytes() const { return room_->limit_bytes(); }
  const std::shared_ptr<MemoryCap>& cap() const { return room_->cap(); }

 private:
  void leave() noexcept;  // keeps nothing more

  const std::shared_ptr<ImageRoom> room_;
  std::atomic<Failure> failure_{Failure::kNone};
  std::atomic<bool> left_{false};
};

}  // namespace cpudist::table
