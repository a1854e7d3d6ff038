// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Memory made before it is needed. The first touch of megabytes takes the system tens of
// milliseconds, which the thread here spends instead of the one that inserts rows.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "base/wait.h"
#include "kernels/aligned.h"

namespace cpudist::table {

// Thread safety: all members. The thread is started by the first order.
class MemoryAhead {
 public:
  using Memory = kernels::AlignedBuffer<uint8_t>;

  // One piece of memory that was asked for. One that is dropped is not made any more.
  class Order {
   public:
    explicit Order(size_t size_bytes) : size_bytes_(size_bytes) {}

   private:
    friend class MemoryAhead;
    enum class State { kWaits, kBegun, kMade, kNone };

    const size_t size_bytes_;
    State state_ = State::kWaits;
    Memory memory_;
  };
  using OrderPtr = std::shared_ptr<Order>;

  MemoryAhead() = default;
  ~MemoryAhead();
  MemoryAhead(const MemoryAhead&) = delete;
  MemoryAhead& operator=(const MemoryAhead&) = delete;

  // Null where no thread can be had.
  OrderPtr order(size_t size_bytes);
  // The one of these that is to be taken next: one that is made, else one that nobody has begun,
  // so that whoever takes it makes it beside the thread, else the first. All are of one size, and
  // there is at least one.
  OrderPtr next_of(std::deque<OrderPtr>* orders);
  // What was ordered, zero-filled. Waits while it is being made, and makes it here if nobody has
  // begun or could. Throws std::bad_alloc.
  Memory take(const OrderPtr& order);

 private:
  void work();

  std::mutex mutex_;
  ConditionVariable wake_;
  ConditionVariable made_;
  std::deque<OrderPtr> waiting_;
  bool stopping_ = false;
  bool refused_ = false;
  std::thread thread_;
};

}  // namespace cpudist::table
