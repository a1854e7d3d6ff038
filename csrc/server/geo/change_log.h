// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Of a set whose trainers step by themselves: what to answer to a push of deltas, which is what the
// other trainers have changed.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "server/geo/changed_rows.h"
#include "server/replies.h"

namespace cpudist::server {

class ChangeLog final : public Replies {
 public:
  ChangeLog(const ParamState& state, std::set<uint32_t> members)
      : state_(state), members_(std::move(members)), rows_(state.layout.tables.size()) {}

  void add_member(uint32_t rank) override { members_.insert(rank); }
  void remove_member(uint32_t rank) override { members_.erase(rank); }
  void follow(uint32_t rank) override;
  void forget(uint32_t rank) override;
  void check_push(const wire::PushHeader& header) const override;
  // That of a single trainer changed nothing that it does not know itself.
  void note(const Pushes& pushes) override;
  // What each is to be told, which then counts as told; with the values of every block.
  std::map<uint32_t, Answer> answers(const Pushes& pushes,
                                     const std::vector<uint32_t>& blocks) override;
  uint64_t size_bytes() const override { return rows_.size_bytes(); }

 private:
  SharedPayload reply(uint32_t rank);

  const ParamState& state_;
  std::set<uint32_t> members_;
  ChangedRows rows_;
};

}  // namespace cpudist::server
