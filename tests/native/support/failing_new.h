// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Memory that runs out at a chosen allocation, in one thread.
#pragma once

#include <cstdint>

namespace cpudist::testing {

// As long as it lives, the allocation number `nth` (from 0) of this thread throws std::bad_alloc,
// those before and behind it do not. One at a time in a thread.
class FailingNew {
 public:
  explicit FailingNew(int64_t nth);
  ~FailingNew();
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;
  bool happened() const;
};

}  // namespace cpudist::testing
