// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What happened, in order: said aloud where one seed is looked at, and summed up always, so that
// two runs can be compared.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "support/seeded_schedule.h"

namespace cpudist::simulator {

// Thread safety: none of its own; it is for threads that run one at a time.
class EventLog {
 public:
  EventLog(const testing::SeededSchedule& schedule, bool aloud)
      : schedule_(schedule), aloud_(aloud) {}

  void note(const std::string& text) {
    const int64_t ms = schedule_.passed().count();
    add(static_cast<uint64_t>(ms));
    for (const char letter : text) add(static_cast<uint8_t>(letter));
    ++count_;
    if (aloud_) std::printf("%8ld ms  %s\n", static_cast<long>(ms), text.c_str());
  }
  uint64_t count() const { return count_; }
  // Of all events and of who ran when.
  uint64_t digest() const { return digest_ ^ schedule_.digest(); }

 private:
  void add(uint64_t value) { digest_ = (digest_ ^ value) * 0x100000001b3u; }

  const testing::SeededSchedule& schedule_;
  const bool aloud_;
  uint64_t count_ = 0;
  uint64_t digest_ = 0xcbf29ce484222325u;
};

}  // namespace cpudist::simulator
