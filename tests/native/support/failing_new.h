// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Memory that runs out at a chosen allocation, in one thread or in all others.
#pragma once

#include <cstdint>

#include "support/check.h"

namespace cpudist::testing {

// As long as it lives, the allocation number `nth` (from 0) of this thread throws std::bad_alloc,
// and so do the `count` - 1 behind it; those before and after them do not. One at a time in a
// thread.
class FailingNew {
 public:
  explicit FailingNew(int64_t nth, int64_t count = 1);
  ~FailingNew();
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;
  bool happened() const;
};

// The same for all threads but this one, whose allocations together are counted. One at a time.
class FailingNewElsewhere {
 public:
  explicit FailingNewElsewhere(int64_t nth, int64_t count = 1);
  ~FailingNewElsewhere();
  FailingNewElsewhere(const FailingNewElsewhere&) = delete;
  FailingNewElsewhere& operator=(const FailingNewElsewhere&) = delete;
  bool happened() const;
};

// Runs `attempt` with the first allocation failing, then with the second, until none does, as it
// returns.
template <typename Attempt>
void at_every_allocation(const Attempt& attempt) {
  bool happened = true;
  for (int64_t nth = 0; happened; ++nth) {
    CHECK(nth < 10000);
    happened = attempt(nth);
  }
}

}  // namespace cpudist::testing
