// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What one connection of a listener has not taken of what it has asked for. While the budget is
// exceeded, nothing more is read from those that have something to take, and those that take
// nothing are given up; far beyond it the others wait a moment too.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "transport/flow_limits.h"

namespace cpudist::transport {

// Thread safety: none.
class Unsent {
 public:
  Unsent(const FlowLimits& limits, std::shared_ptr<FlowBudget> budget)
      : limits_(limits), budget_(std::move(budget)) {}
  ~Unsent() { budget_->change(bytes_, 0); }
  Unsent(const Unsent&) = delete;
  Unsent& operator=(const Unsent&) = delete;

  // So much is queued, and so much of all that ever was has been taken.
  void note(uint64_t queued_bytes, uint64_t taken_bytes, TimePoint now);
  // Whether its next request has to wait; to be asked again in a moment.
  bool holds_back(TimePoint now);
  // Why it is to be given up, if it is.
  std::optional<std::string> overdue(TimePoint now) const;
  uint64_t bytes() const { return bytes_; }
  const FlowLimits& limits() const { return limits_; }

 private:
  const FlowLimits limits_;
  const std::shared_ptr<FlowBudget> budget_;
  uint64_t bytes_ = 0;
  uint64_t step_bytes_ = 0;  // taken when it got on last
  TimePoint step_;
  std::optional<TimePoint> waits_;  // since when its next request does, for others
  bool waited_ = false;             // as long as it has to: it goes on
};

}  // namespace cpudist::transport
