// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/unsent.h"

namespace cpudist::transport {

void Unsent::note(uint64_t queued_bytes, uint64_t taken_bytes, TimePoint now) {
  if (bytes_ == 0 || taken_bytes - step_bytes_ >= kFlowStepBytes) {
    step_bytes_ = taken_bytes;
    step_ = now;
  }
  budget_->change(bytes_, queued_bytes);
  bytes_ = queued_bytes;
}

bool Unsent::holds_back(TimePoint now) {
  const bool others = bytes_ == 0 && budget_->far_exceeded();
  if (!others) {
    waits_.reset();
    waited_ = false;
    return bytes_ > 0 && budget_->exceeded();
  }
  if (waited_) return false;
  if (!waits_) waits_ = now;
  // Its peer hears nothing meanwhile, so that this must not last.
  if (now - *waits_ < limits_.patience) return true;
  waits_.reset();
  waited_ = true;
  return false;
}

std::optional<std::string> Unsent::overdue(TimePoint now) const {
  if (bytes_ == 0 || !budget_->exceeded() || now - step_ < limits_.stalled) return std::nullopt;
  return "of " + std::to_string(bytes_) + " bytes that wait for it, it has not taken " +
         std::to_string(kFlowStepBytes) + " within " + std::to_string(limits_.stalled.count()) +
         " ms, while what is under way holds " + std::to_string(budget_->taken_bytes()) + " of " +
         std::to_string(budget_->bytes()) + " bytes";
}

}  // namespace cpudist::transport
