// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a table with one server that evicts rows is to do, as a dictionary does it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "support/remote_fixture.h"

namespace cpudist::testing {

inline constexpr float kBegun = 3.0f;  // a row begins with it

using RowGradients = std::vector<RowGradient>;

// What a table with one server is to do; values are small multiples of a power of 2, so that sums
// are exact.
class RowDictionary {
 public:
  explicit RowDictionary(const wire::Eviction& rule) : rule_(rule) {}

  struct Row {
    float value = kBegun;
    uint32_t count = 0;
    uint64_t last = 0;
    uint32_t record = 0;
  };

  float value(int64_t key) const {
    const auto found = rows_.find(key);
    return found == rows_.end() ? kBegun : found->second.value;
  }
  const std::map<int64_t, Row>& rows() const { return rows_; }
  size_t size() const { return rows_.size(); }
  const std::vector<int64_t>& gone() const { return gone_; }  // keys, as they went
  uint64_t created() const { return created_; }
  uint64_t evicted() const { return gone_.size(); }
  uint64_t updates() const { return updates_; }

  // Pushes by rank.
  void update(const std::map<uint32_t, RowGradients>& pushes) {
    std::map<int64_t, float> sums;
    for (const auto& [rank, rows] : pushes) {
      for (const RowGradient& row : rows) {
        if (!rows_.contains(row.key)) make(row.key);
        sums[row.key] += row.value;
      }
    }
    for (const auto& [key, sum] : sums) {
      Row& row = rows_.at(key);
      row.value -= sum / static_cast<float>(pushes.size());
      ++row.count;
      row.last = updates_;
    }
    ++updates_;
    sweep();
  }
  uint64_t sweep() {
    std::vector<std::pair<std::array<int64_t, 3>, int64_t>> left;  // by what goes first
    std::map<uint32_t, int64_t> goes;                              // by record
    for (const auto& [key, row] : rows_) {
      const auto age = static_cast<int64_t>(updates_) - 1 - static_cast<int64_t>(row.last);
      if (age <= 0) continue;
      const bool asked = rule_.unseen_steps > 0 || rule_.min_count > 0;
      const bool old = age >= static_cast<int64_t>(rule_.unseen_steps);
      if (asked && old && (rule_.min_count == 0 || row.count < rule_.min_count)) {
        goes[row.record] = key;
        continue;
      }
      const int64_t count = row.count;
      const bool lfu = rule_.order == wire::EvictionOrder::kLfu;
      left.push_back({{lfu ? count : -age, lfu ? -age : count, row.record}, key});
    }
    std::sort(left.begin(), left.end());
    for (const auto& [rank, key] : left) {
      if (rule_.max_rows == 0 || rows_.size() - goes.size() <= rule_.max_rows) break;
      goes[rows_.at(key).record] = key;
    }
    for (auto one = goes.rbegin(); one != goes.rend(); ++one) {
      free_.push_back(one->first);
      gone_.push_back(one->second);
      rows_.erase(one->second);
    }
    return goes.size();
  }

 private:
  void make(int64_t key) {
    Row row;
    row.last = updates_;
    row.record = free_.empty() ? next_++ : free_.back();
    if (!free_.empty()) free_.pop_back();
    rows_[key] = row;
    ++created_;
  }

  const wire::Eviction rule_;
  std::map<int64_t, Row> rows_;
  std::vector<uint32_t> free_;
  uint32_t next_ = 0;
  uint64_t updates_ = 0;
  uint64_t created_ = 0;
  std::vector<int64_t> gone_;
};

}  // namespace cpudist::testing
