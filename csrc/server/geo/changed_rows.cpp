// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/geo/changed_rows.h"

#include <algorithm>
#include <bit>

namespace cpudist::server {

void ChangedRows::follow(uint32_t rank) { trainers_[rank] = std::vector<Bits>(table_count_); }

void ChangedRows::forget(uint32_t rank) { trainers_.erase(rank); }

void ChangedRows::mark(uint32_t knows, uint32_t table, std::span<const int32_t> records) {
  if (records.empty()) return;
  const auto last = static_cast<uint32_t>(*std::max_element(records.begin(), records.end()));
  for (auto& [rank, tables] : trainers_) {
    if (rank == knows) continue;
    Bits& bits = tables[table];
    if (bits.size() <= last / 64) bits.resize(last / 64 + 1);
    for (const int32_t record : records) {
      const auto at = static_cast<uint32_t>(record);
      bits[at / 64] |= uint64_t{1} << (at % 64);
    }
  }
}

std::vector<uint32_t> ChangedRows::take(uint32_t rank, uint32_t table, uint64_t limit, bool* more) {
  std::vector<uint32_t> records;
  const auto found = trainers_.find(rank);
  if (found == trainers_.end()) return records;
  Bits& bits = found->second[table];
  for (size_t word = 0; word < bits.size(); ++word) {
    while (bits[word] != 0) {
      if (records.size() >= limit) {
        *more = true;
        return records;
      }
      const auto bit = static_cast<uint32_t>(std::countr_zero(bits[word]));
      bits[word] &= bits[word] - 1;
      records.push_back(static_cast<uint32_t>(word * 64) + bit);
    }
  }
  return records;
}

uint64_t ChangedRows::size_bytes() const {
  uint64_t size = 0;
  for (const auto& [rank, tables] : trainers_) {
    for (const Bits& bits : tables) size += bits.capacity() * sizeof(uint64_t);
  }
  return size;
}

}  // namespace cpudist::server
