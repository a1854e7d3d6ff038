// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/ahead.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/errors.h"
#include "base/threads.h"

namespace cpudist::table {

MemoryAhead::~MemoryAhead() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) join_thread(thread_);
}

MemoryAhead::OrderPtr MemoryAhead::order(size_t size_bytes) {
  auto order = std::make_shared<Order>(size_bytes);
  {
    const std::lock_guard lock(mutex_);
    if (refused_) return nullptr;
    if (!thread_.joinable()) {
      try {
        thread_ = start_io_thread("the thread that makes memory for rows", [this] { work(); });
      } catch (const Error&) {
        refused_ = true;  // whoever inserts rows makes it, as late as can be
        return nullptr;
      }
    }
    waiting_.push_back(order);
  }
  wake_.notify_one();
  return order;
}

void MemoryAhead::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    const OrderPtr order = std::move(waiting_.front());
    waiting_.pop_front();
    if (order.use_count() == 1 || order->state_ != Order::State::kWaits) continue;
    order->state_ = Order::State::kBegun;
    lock.unlock();
    Memory memory;
    bool made = true;
    try {
      memory = Memory(order->size_bytes_);
    } catch (const std::bad_alloc&) {
      made = false;
    }
    lock.lock();
    order->memory_ = std::move(memory);
    order->state_ = made ? Order::State::kMade : Order::State::kNone;
    made_.notify_all();
  }
}

MemoryAhead::OrderPtr MemoryAhead::next_of(std::deque<OrderPtr>* orders) {
  const std::lock_guard lock(mutex_);
  const auto in = [&](Order::State state) {
    return std::find_if(orders->begin(), orders->end(),
                        [state](const OrderPtr& order) { return order->state_ == state; });
  };
  auto found = in(Order::State::kMade);
  if (found == orders->end()) found = in(Order::State::kWaits);
  if (found == orders->end()) found = orders->begin();
  const OrderPtr order = *found;
  // Whoever takes it makes it: the thread goes on with another.
  if (order->state_ == Order::State::kWaits) order->state_ = Order::State::kNone;
  orders->erase(found);
  return order;
}

MemoryAhead::Memory MemoryAhead::take(const OrderPtr& order) {
  {
    std::unique_lock lock(mutex_);
    made_.wait(lock, [&] { return order->state_ != Order::State::kBegun; });
    const bool made = order->state_ == Order::State::kMade;
    order->state_ = Order::State::kNone;
    if (made) return std::move(order->memory_);
  }
  return Memory(order->size_bytes_);
}

}  // namespace cpudist::table
