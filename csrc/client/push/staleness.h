// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How old gradients were when they were applied.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "wire/messages.h"

namespace cpudist::client {

// How old gradients were when they were applied: updates, and samples behind them, between the
// reading of the oldest value and the update. Bucket 0 counts the age 0, bucket i ages from 2^(i-1)
// to 2^i - 1.
struct StalenessStats {
  static constexpr size_t kBuckets = 65;
  std::array<uint64_t, kBuckets> steps{};
  std::array<uint64_t, kBuckets> samples{};
  uint64_t pushes = 0;
  uint64_t merged = 0;      // pushes that travelled with an earlier one
  uint64_t overloaded = 0;  // refusals for lack of memory, sent again
  uint64_t steps_sum = 0;
  uint64_t samples_sum = 0;
  uint64_t steps_max = 0;
  uint64_t samples_max = 0;
  void add(const StalenessStats& other);
  // A push, by what each server had when its values were `read` (kAnyStaleness: nothing was) and
  // after the update that `applied` it.
  void count(std::span<const wire::Version> read, std::span<const wire::Version> applied,
             uint64_t own_samples);
};

}  // namespace cpudist::client
