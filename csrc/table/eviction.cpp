// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/eviction.h"

#include <algorithm>
#include <chrono>
#include <limits>

namespace cpudist::table {
namespace {

constexpr uint64_t kMoments = 64;

uint64_t share_of(uint64_t rows, uint64_t own, uint64_t all) {
  __extension__ using uint128 = unsigned __int128;
  return static_cast<uint64_t>((uint128{rows} * own + all - 1) / all);
}

Clock::duration duration_of(uint64_t ms) {
  // Of longer ones the clock knows nothing.
  constexpr uint64_t kMost = uint64_t{1} << 42;
  return std::chrono::milliseconds(std::min(ms, kMost));
}

}  // namespace

Eviction::Eviction(const wire::Eviction& rule, uint64_t own_buckets, uint64_t buckets)
    : rule_(rule),
      expires_(rule.unseen_steps > 0 || rule.unseen_ms > 0 || rule.min_count > 0),
      // Who owns nothing gets no rows either.
      most_rows_(rule.max_rows == 0
                     ? 0
                     : std::max<uint64_t>(share_of(rule.max_rows, own_buckets, buckets), 1)) {}

void Eviction::note(uint64_t updates, TimePoint now) {
  if (rule_.unseen_ms == 0) return;
  const Clock::duration unseen = duration_of(rule_.unseen_ms);
  if (moments_.empty() || now - moments_.back().time >= unseen / kMoments) {
    moments_.push_back({now, updates});
  }
  while (moments_.size() > 1 && now - moments_[1].time >= unseen) moments_.pop_front();
}

void Eviction::renumber(uint64_t before, uint64_t after) {
  for (Moment& moment : moments_) moment.updates += after - before;
}

uint64_t Eviction::least_age(uint64_t updates, TimePoint now) const {
  uint64_t least = std::max<uint64_t>(rule_.unseen_steps, 1);
  if (rule_.unseen_ms == 0) return least;
  const Clock::duration unseen = duration_of(rule_.unseen_ms);
  uint64_t by_time = std::numeric_limits<uint64_t>::max();
  for (const Moment& moment : moments_) {
    if (now - moment.time < unseen) break;
    by_time = updates - std::min(updates, moment.updates);
  }
  return std::max(least, by_time);
}

}  // namespace cpudist::table
