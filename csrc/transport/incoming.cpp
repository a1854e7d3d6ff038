// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/incoming.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace cpudist::transport {
namespace {

constexpr uint64_t kBudgetBytesMin = 256ull << 20;
constexpr uint64_t kBudgetBytesMax = 4096ull << 20;
constexpr uint64_t kPartOfMemory = 8;

std::string text_of(std::chrono::milliseconds time) { return std::to_string(time.count()) + " ms"; }

}  // namespace

IncomingLimits::IncomingLimits() {
  const int64_t pages = sysconf(_SC_PHYS_PAGES);
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const bool known = pages > 0 && page_bytes > 0;
  const uint64_t memory =
      known ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(page_bytes) : 0;
  budget_bytes = std::clamp(memory / kPartOfMemory, kBudgetBytesMin, kBudgetBytesMax);
}

void IncomingLimits::heed(std::chrono::milliseconds liveness) {
  slow = std::max<std::chrono::milliseconds>(2 * liveness, slow);
  patience = liveness / 4;
  stalled = liveness / 5;
}

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
  entries_.erase(entry);
}

void Incoming::came(Entry& entry, uint64_t have_bytes, uint64_t held_bytes, TimePoint now) {
  const std::lock_guard lock(mutex_);
  held_bytes_ += held_bytes - entry.held_bytes;
  entry.held_bytes = held_bytes;
  if (have_bytes - entry.step_bytes < kStepBytes) return;
  entry.step_bytes = have_bytes;
  entry.step = now;
}

bool Incoming::may_grow(Entries::iterator entry, TimePoint now) {
  const std::lock_guard lock(mutex_);
  // Some of the oldest go on together: one alone may be slow.
  uint64_t before_bytes = 0;
  if (held_bytes_ > limits_.budget_bytes) {
    for (auto older = entries_.begin(); older != entry; ++older) before_bytes += older->held_bytes;
  }
  const bool room = held_bytes_ <= limits_.budget_bytes ||
                    before_bytes + entry->held_bytes <= limits_.budget_bytes / 2 ||
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
  const bool crowded = held_bytes_ > limits_.budget_bytes;
  const auto limit = crowded ? std::min(limits_.stalled, limits_.slow) : limits_.slow;
  const TimePoint since =
      entry.waits ? std::max(entry.step, *entry.waits + limits_.patience) : entry.step;
  if (now - since < limit) return std::nullopt;
  std::string why = "a frame has neither ended nor got on by " + std::to_string(kStepBytes) +
                    " bytes within " + text_of(limit);
  if (crowded) {
    why += ", while unfinished ones hold " + std::to_string(held_bytes_) + " of " +
           std::to_string(limits_.budget_bytes) + " bytes";
  }
  return why;
}

uint64_t Incoming::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return held_bytes_;
}

}  // namespace cpudist::transport
