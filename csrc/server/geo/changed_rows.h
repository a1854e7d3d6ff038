// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// For each trainer, the rows that others have changed since it was last told. One bit per row and
// trainer: rows of a table have record numbers without gaps.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace cpudist::server {

// Thread safety: one caller at a time.
class ChangedRows {
 public:
  static constexpr uint32_t kNobody = 0xffffffffu;

  explicit ChangedRows(size_t table_count) : table_count_(table_count) {}

  // From now on, beginning with no row; a trainer that is followed begins anew.
  void follow(uint32_t rank);
  void forget(uint32_t rank);
  // For every trainer that is followed but `knows`.
  void mark(uint32_t knows, uint32_t table, std::span<const int32_t> records);
  // Up to `limit` records, lowest first, of which the trainer counts as told. `*more` is set when
  // there are others.
  std::vector<uint32_t> take(uint32_t rank, uint32_t table, uint64_t limit, bool* more);
  uint64_t size_bytes() const;

 private:
  using Bits = std::vector<uint64_t>;

  const size_t table_count_;
  std::map<uint32_t, std::vector<Bits>> trainers_;
};

}  // namespace cpudist::server
