// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Drawing faults and delivering in order of time.

#include "transport/inproc/faults.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace cpudist::transport::inproc {
namespace {

// A frame held back for a swap goes out after this if no other frame follows.
constexpr auto kHoldLongest = std::chrono::milliseconds(5);

}  // namespace

FaultSchedule::FaultSchedule(const FaultPlan& plan) : plan_(plan), generator_(plan.seed) {
  for (const double p : {plan.drop, plan.duplicate, plan.reorder, plan.delay, plan.cut}) {
    if (!(p >= 0.0 && p <= 1.0)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "fault plan: expected probabilities in [0, 1], found " + std::to_string(p));
    }
  }
}

double FaultSchedule::draw() { return static_cast<double>(generator_() >> 11) * 0x1p-53; }

bool FaultSchedule::later(const Event& a, const Event& b) {
  return a.when != b.when ? a.when > b.when : a.order > b.order;
}

void FaultSchedule::push(Event event) {
  event.order = next_order_++;
  heap_.push_back(std::move(event));
  std::push_heap(heap_.begin(), heap_.end(), later);
  changed_.notify_one();
}

FaultSchedule::Event FaultSchedule::pop() {
  std::pop_heap(heap_.begin(), heap_.end(), later);
  Event event = std::move(heap_.back());
  heap_.pop_back();
  return event;
}

void FaultSchedule::release_held(const std::shared_ptr<Link>& link, End& to, TimePoint when) {
  Link::Lane& lane = link->lane_to(to);
  if (!lane.holding) return;
  lane.holding = false;
  push({when, 0, What::kFrame, link, &to, std::move(lane.held), 0, {}});
}

bool FaultSchedule::send(const std::shared_ptr<Link>& link, End& to, wire::Frame frame) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopped_) return false;
  // Every frame takes the same number of draws: the fate of one does not shift that of the next.
  const bool cut = draw() < plan_.cut;
  const bool drop = draw() < plan_.drop;
  const bool duplicate = draw() < plan_.duplicate;
  const bool reorder = draw() < plan_.reorder;
  const bool delay = draw() < plan_.delay;
  const double delay_ms = draw() * static_cast<double>(plan_.delay_ms_max);

  Link::Lane& lane = link->lane_to(to);
  TimePoint when = Clock::now();
  if (delay && !drop && !cut) {
    when += std::chrono::microseconds(static_cast<int64_t>(delay_ms * 1000));
    ++counts_.delayed;
  }
  // A delay holds back what follows, as a slow link does; only `reorder` changes the order.
  when = std::max(when, lane.last);
  lane.last = when;
  if (cut) {
    push({when, 0, What::kCut, link, &to, {}, 0, "cut by the fault plan"});
    return true;
  }
  if (drop) {
    ++counts_.dropped;
    return true;
  }
  std::optional<wire::Frame> copy;
  if (duplicate) {
    copy = wire::Frame{frame.header, frame.payload.share()};
    ++counts_.duplicated;
  }
  if (reorder && !lane.holding) {
    lane.holding = true;
    lane.held = std::move(frame);
    lane.held_id = next_order_;
    push({when + kHoldLongest, 0, What::kRelease, link, &to, {}, lane.held_id, {}});
  } else {
    push({when, 0, What::kFrame, link, &to, std::move(frame), 0, {}});
    if (lane.holding) ++counts_.reordered;
    release_held(link, to, when);
  }
  if (copy) push({when, 0, What::kFrame, link, &to, std::move(*copy), 0, {}});
  return true;
}

void FaultSchedule::close(const std::shared_ptr<Link>& link, End& to, const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopped_) return;
  const TimePoint when = std::max(Clock::now(), link->lane_to(to).last);
  release_held(link, to, when);
  push({when, 0, What::kClose, link, &to, {}, 0, reason});
}

FaultCounts FaultSchedule::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

void FaultSchedule::happen(Event event) {
  switch (event.what) {
    case What::kFrame:
      if (event.to->deliver(std::move(event.frame))) count(&FaultCounts::delivered);
      break;
    case What::kCut:
      // Counted first: who learns of the cut finds it counted.
      if (!event.to->closed()) count(&FaultCounts::cut);
      event.to->peer().close_here(event.reason);
      event.to->close_here(event.reason);
      break;
    case What::kClose:
      event.to->close_here(event.reason);
      break;
    case What::kRelease:
      break;
  }
}

void FaultSchedule::count(uint64_t FaultCounts::* counter) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++(counts_.*counter);
}

void FaultSchedule::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    if (heap_.empty()) {
      changed_.wait(lock);
      continue;
    }
    if (heap_.front().when > Clock::now()) {
      changed_.wait_until(lock, TimePoint(heap_.front().when));
      continue;
    }
    Event event = pop();
    if (event.what == What::kRelease) {
      const Link::Lane& lane = event.link->lane_to(*event.to);
      if (lane.holding && lane.held_id == event.held_id) {
        release_held(event.link, *event.to, event.when);
      }
      continue;
    }
    lock.unlock();
    happen(std::move(event));
    lock.lock();
  }
}

void FaultSchedule::stop() {
  std::vector<Event> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  dropped.swap(heap_);
  changed_.notify_all();
}

}  // namespace cpudist::transport::inproc
