// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/push/staleness.h"

#include <algorithm>
#include <bit>

namespace cpudist::client {
namespace {

// 0, 1, 2-3, 4-7, ...
size_t bucket_of(uint64_t value) { return static_cast<size_t>(std::bit_width(value)); }

}  // namespace

void StalenessStats::add(const StalenessStats& other) {
  for (size_t i = 0; i < kBuckets; ++i) {
    steps[i] += other.steps[i];
    samples[i] += other.samples[i];
  }
  pushes += other.pushes;
  merged += other.merged;
  overloaded += other.overloaded;
  steps_sum += other.steps_sum;
  samples_sum += other.samples_sum;
  steps_max = std::max(steps_max, other.steps_max);
  samples_max = std::max(samples_max, other.samples_max);
}

void StalenessStats::count(std::span<const wire::Version> read,
                           std::span<const wire::Version> applied, uint64_t own_samples) {
  wire::Version age;
  for (size_t s = 0; s < applied.size(); ++s) {
    if (read[s].round == wire::kAnyStaleness) continue;
    age.round = std::max(age.round, applied[s].round - 1 - read[s].round);
    age.samples = std::max(age.samples, applied[s].samples - own_samples - read[s].samples);
  }
  ++pushes;
  ++steps[bucket_of(age.round)];
  ++samples[bucket_of(age.samples)];
  steps_sum += age.round;
  samples_sum += age.samples;
  steps_max = std::max(steps_max, age.round);
  samples_max = std::max(samples_max, age.samples);
}

}  // namespace cpudist::client
