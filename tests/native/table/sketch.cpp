// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// What is counted of keys without rows, and what tables that admit by it or by chance say of a key.

#include "table/admission/sketch.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "support/check.h"
#include "table/admission/rule.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT
using table::AdmissionRule;
using table::KeySketch;

namespace {

wire::TableSpec table_with(const wire::Admission& admission, bool evicts = false) {
  wire::TableSpec spec{"words", 1000, 4, 0};
  spec.remote = true;
  spec.seed = 5;
  spec.admission = admission;
  if (evicts) spec.eviction = {.on = true, .unseen_steps = 1};
  return spec;
}

wire::Admission by_count(uint32_t count, uint64_t sketch_bytes = 4096) {
  return {wire::AdmissionKind::kCount, count, 1.0, sketch_bytes};
}

}  // namespace

TEST(sketch_never_says_less_than_was_counted) {
  std::mt19937_64 random(3);
  KeySketch sketch(1024);
  std::map<uint64_t, uint32_t> counted;
  // As many additions as there may be before the first is halved.
  for (uint64_t i = 0; i < 2 * 1024; ++i) {
    const uint64_t hash = kernels::mix64(1 + random() % 600);
    sketch.add(hash, 1);
    ++counted[hash];
    CHECK(sketch.count(hash) >= std::min(counted[hash], KeySketch::kMost));
  }
  uint64_t exact = 0;
  for (const auto& [hash, count] : counted) {
    CHECK(sketch.count(hash) >= std::min(count, KeySketch::kMost));
    exact += sketch.count(hash) == std::min(count, KeySketch::kMost);
  }
  CHECK(exact > counted.size() / 2);
}

TEST(sketch_that_is_nearly_empty_is_exact) {
  KeySketch sketch(1 << 20);
  for (uint64_t key = 1; key <= 500; ++key) sketch.add(kernels::mix64(key), key % 5);
  uint64_t more = 0;
  for (uint64_t key = 1; key <= 500; ++key) more += sketch.count(kernels::mix64(key)) != key % 5;
  for (uint64_t key = 501; key <= 20000; ++key) more += sketch.count(kernels::mix64(key)) != 0;
  CHECK(more <= 2);
}

TEST(sketch_counts_no_further_than_it_can) {
  KeySketch sketch(64);
  sketch.add(7, 14);
  CHECK_EQ(sketch.count(7), 14u);
  sketch.add(7, 3);
  CHECK_EQ(sketch.count(7), KeySketch::kMost);
}

TEST(sketch_halves_each_line_once_in_as_many_additions) {
  constexpr uint64_t kBytes = 128;  // two lines, which take 256 additions each
  KeySketch sketch(kBytes);
  const uint64_t first = 5;            // low hashes: the first line
  const uint64_t last = ~uint64_t{0};  // the second line
  sketch.add(first, 8);
  sketch.add(last, 8);
  // No addition of these raises anything after the first fifteen.
  const uint64_t other = 5 + 9;  // other counters of the first line
  for (uint64_t i = 16; i < 2 * kBytes + 127; ++i) sketch.add(other, 1);
  CHECK_EQ(sketch.count(first), 8u);
  sketch.add(other, 1);
  CHECK_EQ(sketch.count(first), 4u);
  CHECK_EQ(sketch.count(last), 8u);
  for (uint64_t i = 0; i < 128; ++i) sketch.add(other, 1);
  CHECK_EQ(sketch.count(first), 4u);
  CHECK_EQ(sketch.count(last), 4u);
  for (uint64_t i = 0; i < 128; ++i) sketch.add(other, 1);
  CHECK_EQ(sketch.count(first), 2u);
  CHECK_EQ(sketch.count(last), 4u);
  sketch.clear();
  CHECK_EQ(sketch.count(first) + sketch.count(last) + sketch.count(other), 0u);
}

TEST(sketch_forgets_a_key) {
  KeySketch sketch(1 << 16);
  sketch.add(kernels::mix64(1), 3);
  sketch.add(kernels::mix64(2), 2);
  sketch.forget(kernels::mix64(1));
  CHECK_EQ(sketch.count(kernels::mix64(1)), 0u);
  CHECK_EQ(sketch.count(kernels::mix64(2)), 2u);
}

TEST(admission_by_count_waits_for_its_push) {
  AdmissionRule rule(table_with(by_count(3)));
  CHECK(!rule.admits_all());
  CHECK_EQ(rule.size_bytes(), 0u);
  CHECK_EQ(rule.planned_bytes(), 4096u);
  rule.begin();
  CHECK_EQ(rule.size_bytes(), 4096u);
  CHECK_EQ(rule.pushes_until(-7), 3u);
  rule.note_dropped(-7, 1);
  CHECK_EQ(rule.pushes_until(-7), 2u);
  CHECK_EQ(rule.pushes_until(7), 3u);
  rule.note_dropped(-7, 1);
  CHECK_EQ(rule.pushes_until(-7), 1u);
  rule.note_made(-7, 0);
  CHECK_EQ(rule.pushes_until(-7), 1u);  // no row is evicted: nobody asks again
  CHECK_EQ(rule.dropped_rows(), 2u);
  rule.forget_all();
  CHECK_EQ(rule.pushes_until(-7), 3u);
}

TEST(admission_of_a_key_that_loses_its_row_begins_anew) {
  AdmissionRule rule(table_with(by_count(3), true));
  rule.begin();
  rule.note_dropped(4, 2);
  rule.note_made(4, 0);
  CHECK_EQ(rule.pushes_until(4), 3u);
  rule.note_made(5, 2);  // two pushes of one update, and a third that made it
  CHECK_EQ(rule.pushes_until(5), 3u);
  CHECK_EQ(rule.dropped_rows(), 4u);
}

TEST(admission_of_all_takes_no_memory) {
  for (const auto& given : {wire::Admission{}, by_count(1),
                            wire::Admission{wire::AdmissionKind::kProbability, 0, 1.0, 0}}) {
    AdmissionRule rule(table_with(given));
    rule.begin();
    CHECK(rule.admits_all());
    CHECK_EQ(rule.size_bytes() + rule.planned_bytes(), 0u);
    CHECK_EQ(rule.pushes_until(3), 1u);
  }
}

TEST(admission_by_chance_decides_once_for_each_key) {
  constexpr int64_t kKeys = 20000;
  const auto admitted = [](double probability, uint64_t seed) {
    AdmissionRule rule(table_with({wire::AdmissionKind::kProbability, 0, probability, 0}));
    rule.set_seed(seed);
    rule.begin();
    CHECK_EQ(rule.size_bytes(), 0u);
    std::vector<bool> found;
    for (int64_t key = -kKeys / 2; key < kKeys / 2; ++key) {
      const uint32_t until = rule.pushes_until(key);
      CHECK(until == 1 || until == AdmissionRule::kNever);
      rule.note_dropped(key, 1);
      CHECK_EQ(rule.pushes_until(key), until);
      found.push_back(until == 1);
    }
    return found;
  };
  const std::vector<bool> quarter = admitted(0.25, 9);
  const auto count = static_cast<double>(std::count(quarter.begin(), quarter.end(), true));
  CHECK(std::abs(count - kKeys * 0.25) < 5 * std::sqrt(kKeys * 0.25 * 0.75));
  CHECK(admitted(0.25, 9) == quarter);
  CHECK(admitted(0.25, 10) != quarter);
  // Who is admitted at one probability is so at a higher one.
  const std::vector<bool> half = admitted(0.5, 9);
  for (size_t i = 0; i < half.size(); ++i) CHECK(half[i] || !quarter[i]);
}
