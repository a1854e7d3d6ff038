// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Which keys without a row get one in an update, and which rows of its pushes are dropped: a key
// counts once for each push that names it, and the push that its table waits for makes the row and
// is the first that is applied. A push without weight, of no samples, counts for nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "table/admission/rule.h"

namespace cpudist::server {

// The keys of one table that had no row when their pushes arrived.
struct NamedKeys {
  std::span<const int64_t> distinct;
  std::span<const uint32_t> records;  // of distinct keys; kNone: there is no row now
  std::span<const uint32_t> inverse;  // of each key as it is named, its place in `distinct`
  std::span<const size_t> ends;       // of each push, in the order of ranks: where its keys end
  std::span<const uint8_t> counts;    // of each push: whether it has weight
};

class AdmittedKeys {
 public:
  // Decides, and changes nothing. Throws std::bad_alloc. Without it every key gets a row.
  void plan(const NamedKeys& keys, const table::AdmissionRule& rule);
  // Of distinct keys without a row.
  bool makes(size_t place) const { return needed_.empty() || pushes_[place] >= needed_[place]; }
  // Of keys as they are named: its row of a push is not applied.
  bool drops(size_t key) const { return !dropped_.empty() && dropped_[key] != 0; }
  // The update is made: tells the rule what was planned.
  void commit(std::span<const int64_t> distinct, table::AdmissionRule* rule) const noexcept;

 private:
  std::vector<uint32_t> pushes_;  // of distinct keys: how many that count name it
  std::vector<uint32_t> needed_;  // which of those makes its row; 0: it has one
  std::vector<size_t> named_in_;  // the last push that counts and names it, from 1
  std::vector<uint8_t> dropped_;  // of keys as they are named
};

}  // namespace cpudist::server
