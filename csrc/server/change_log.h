// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Of a set whose trainers step by themselves: what to answer to a push of deltas, which is what the
// other trainers have changed.
#pragma once

#include <cstdint>
#include <set>

#include "server/changed_rows.h"
#include "server/state.h"

namespace cpudist::server {

// Thread safety: that of the set, whose lock is held exclusively.
class ChangeLog {
 public:
  ChangeLog(const ParamState& state, std::set<uint32_t> members)
      : state_(state), members_(std::move(members)), rows_(state.layout.tables.size()) {}

  void add_member(uint32_t rank) { members_.insert(rank); }
  void remove_member(uint32_t rank) { members_.erase(rank); }
  // `rank` takes part, and has all values as of now.
  void follow(uint32_t rank);
  void forget(uint32_t rank);  // it does not come back, or begins anew
  // An update was made of these pushes. That of a single trainer changed nothing that it does not
  // know itself.
  void note(const RoundPushes& pushes);
  // What `rank` is to be told, which then counts as told.
  SharedPayload reply(uint32_t rank);
  uint64_t size_bytes() const { return rows_.size_bytes(); }

 private:
  const ParamState& state_;
  std::set<uint32_t> members_;
  ChangedRows rows_;
};

}  // namespace cpudist::server
