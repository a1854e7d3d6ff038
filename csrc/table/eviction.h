// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Which rows of a table go: those that nobody has updated for a while, or those that are too many.
// A row is told by its age, the updates of the parameter set since its last one, and by how many
// updates it has had.
#pragma once

#include <cstdint>
#include <deque>

#include "base/clock.h"
#include "wire/layout.h"

namespace cpudist::table {

// Thread safety: const members.
class Eviction {
 public:
  Eviction() = default;  // nothing goes
  // `rule` of a table of which a server has this share of `buckets`: of max_rows too, rounded up.
  Eviction(const wire::Eviction& rule, uint64_t own_buckets, uint64_t buckets);

  bool on() const { return rule_.on; }
  uint64_t most_rows() const { return most_rows_; }  // 0: any number

  // The set has had so many updates by now: what ages mean in time. Times are kept in steps of a
  // 64th of the rule's, by which a row may go later. Throws std::bad_alloc.
  void note(uint64_t updates, TimePoint now);
  // Updates are counted from elsewhere.
  void renumber(uint64_t before, uint64_t after);

  // The least age of rows that have been unseen for as long as the rule asks. Never 0, and beyond
  // every age where the rule asks for time and nothing is that old.
  uint64_t least_age(uint64_t updates, TimePoint now) const;
  // Whether a row goes. None does of which only the number is limited.
  bool expired(uint32_t age, uint32_t count, uint64_t least_age) const {
    return expires_ && age >= least_age && (rule_.min_count == 0 || count < rule_.min_count);
  }
  // Among rows that are too many those with the highest rank go.
  uint64_t rank(uint32_t age, uint32_t count) const {
    const uint64_t rare = ~count;
    return rule_.order == wire::EvictionOrder::kLfu ? rare << 32 | age : uint64_t{age} << 32 | rare;
  }

 private:
  struct Moment {
    TimePoint time;
    uint64_t updates;  // that the set had had by then
  };

  wire::Eviction rule_;
  bool expires_ = false;
  uint64_t most_rows_ = 0;
  std::deque<Moment> moments_;  // the oldest first; of the first only the last that is old enough
};

}  // namespace cpudist::table
