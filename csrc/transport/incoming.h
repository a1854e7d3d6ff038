// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frames that have begun to come in and are not complete, over all connections of a listener: those
// that do not get on are given up, and those that began last wait while the budget is exceeded.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "transport/flow_limits.h"

namespace cpudist::transport {

// Thread safety: all members.
class Incoming : public std::enable_shared_from_this<Incoming> {
 public:
  Incoming(FlowLimits limits, std::shared_ptr<FlowBudget> budget)
      : limits_(limits), budget_(std::move(budget)) {}

 private:
  struct Entry {
    uint64_t held_bytes = 0;
    uint64_t step_bytes = 0;  // when it got on last
    TimePoint step;
    std::optional<TimePoint> waits;  // since when it may not grow
  };
  using Entries = std::list<Entry>;  // oldest first

 public:
  // One of them, until it is complete or given up.
  class Frame {
   public:
    Frame(std::shared_ptr<Incoming> all, Entries::iterator entry)
        : all_(std::move(all)), entry_(entry) {}
    ~Frame() { all_->end(entry_); }
    Frame(const Frame&) = delete;
    Frame& operator=(const Frame&) = delete;
    // So many bytes of it have come, and so many of these are kept.
    void came(uint64_t have_bytes, uint64_t held_bytes, TimePoint now) {
      all_->came(*entry_, have_bytes, held_bytes, now);
    }
    // False where others are to be complete first: to be asked again in a moment.
    bool may_grow(TimePoint now) { return all_->may_grow(entry_, now); }
    // Why it is to be given up, if it is.
    std::optional<std::string> overdue(TimePoint now) { return all_->overdue(*entry_, now); }

   private:
    const std::shared_ptr<Incoming> all_;
    const Entries::iterator entry_;
  };

  std::unique_ptr<Frame> begin(TimePoint now);
  uint64_t held_bytes() const;
  const FlowLimits& limits() const { return limits_; }

 private:
  void end(Entries::iterator entry);
  void came(Entry& entry, uint64_t have_bytes, uint64_t held_bytes, TimePoint now);
  bool may_grow(Entries::iterator entry, TimePoint now);
  std::optional<std::string> overdue(const Entry& entry, TimePoint now) const;

  const FlowLimits limits_;
  const std::shared_ptr<FlowBudget> budget_;
  mutable std::mutex mutex_;
  Entries entries_;
  uint64_t held_bytes_ = 0;
};

}  // namespace cpudist::transport
