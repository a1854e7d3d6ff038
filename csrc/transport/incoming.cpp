// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/incoming.h"

#include <algorithm>
#include <utility>

namespace cpudist::transport {
namespace {

std::string text_of(std::chrono::milliseconds time) { return std::to_string(time.count()) + " ms"; }

}  // namespace

std::unique_ptr<Incoming::Frame> Incoming::begin(TimePoint now) {
  Entries made(1);
  made.front().step = now;
  const auto entry = made.begin();
  auto self = shared_from_this();
  const std::lock_guard lock(mutex_);
  entries_.splice(entries_.end(), made);
  try {
    return std::make_unique<Frame>(std::move(self), entry);
  } catch (...) {
    entries_.erase(entry);
    throw;
  }
}

void Incoming::end(Entries::iterator entry) {
  const std::lock_guard lock(mutex_);
  held_bytes_ -= entry->held_bytes;
  budget_->change(entry->held_bytes, 0);
  entries_.erase(entry);
}

void Incoming::came(Entry& entry, uint64_t have_bytes, uint64_t held_bytes, TimePoint now) {
  const std::lock_guard lock(mutex_);
  held_bytes_ += held_bytes - entry.held_bytes;
  budget_->change(entry.held_bytes, held_bytes);
  entry.held_bytes = held_bytes;
  if (have_bytes - entry.step_bytes < kFlowStepBytes) return;
  entry.step_bytes = have_bytes;
  entry.step = now;
}

bool Incoming::may_grow(Entries::iterator entry, TimePoint now) {
  const std::lock_guard lock(mutex_);
  // Some of the oldest go on together: one alone may be slow.
  uint64_t before_bytes = 0;
  const bool crowded = budget_->exceeded();
  if (crowded) {
    for (auto older = entries_.begin(); older != entry; ++older) before_bytes += older->held_bytes;
  }
  const bool room = !crowded || before_bytes + entry->held_bytes <= budget_->bytes() / 2 ||
                    entry == entries_.begin();
  if (!room) {
    if (!entry->waits) entry->waits = now;
    if (now - *entry->waits < limits_.patience) return false;
  }
  // It could not get on while it waited.
  if (entry->waits && room) {
    entry->waits.reset();
    entry->step = now;
  }
  return true;
}

std::optional<std::string> Incoming::overdue(const Entry& entry, TimePoint now) const {
  const std::lock_guard lock(mutex_);
  if (entry.waits && now - *entry.waits < limits_.patience) return std::nullopt;
  const bool crowded = budget_->exceeded();
  const auto limit = crowded ? std::min(limits_.stalled, limits_.slow) : limits_.slow;
  const TimePoint since =
      entry.waits ? std::max(entry.step, *entry.waits + limits_.patience) : entry.step;
  if (now - since < limit) return std::nullopt;
  std::string why = "a frame has neither ended nor got on by " + std::to_string(kFlowStepBytes) +
                    " bytes within " + text_of(limit);
  if (crowded) {
    why += ", while what is under way holds " + std::to_string(budget_->taken_bytes()) + " of " +
           std::to_string(budget_->bytes()) + " bytes";
  }
  return why;
}

uint64_t Incoming::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return held_bytes_;
}

}  // namespace cpudist::transport
