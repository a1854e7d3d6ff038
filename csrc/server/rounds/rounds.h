// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A set that is updated in rounds: one group of all its trainers (Sync) or several, which do not
// wait for each other (HalfAsync).
#pragma once

#include <memory>
#include <set>
#include <vector>

#include "server/policy.h"
#include "server/rounds/group.h"

namespace cpudist::server {

class Rounds final : public UpdatePolicy {
 public:
  Rounds(ParamState& state, const std::set<uint32_t>& members);

  bool needs_everyone() const override { return true; }
  bool sends_again() const override { return false; }
  uint64_t round_of(uint32_t rank) const override;
  std::vector<uint32_t> waiting_for(wire::FrameKind kind, uint32_t rank) const override;

  void check_open(uint32_t rank) const override;
  void start(uint32_t) override {}
  void join(const Ticket& ticket, const wire::Join& join, Outbox& outbox) override;
  void take_out(uint32_t rank, Outbox& outbox) override;
  void forget(uint32_t) override {}
  void drop(uint32_t rank, Outbox& outbox) override;
  void add_members(const std::set<uint32_t>& ranks) override;
  void excuse(uint32_t, Outbox&) override {}  // a group marks between two of its rounds
  void fail_waiting(const Error& error, Outbox& outbox) override;

  void check_push(const Ticket& ticket, const wire::PushHeader& header) const override;
  bool is_due(uint32_t) const override { return false; }
  void push(Push push, Outbox& outbox) override;
  bool has_pushes() const override;
  void give_up(uint32_t rank, const Error& error, Outbox& outbox) override;
  void commit(const Ticket& ticket, const Buffer& payload, Outbox& outbox) override;

  void values_stored() override {}
  void rows_freed(const table::Table&, std::span<const table::Freed>) override {}
  // Of several groups each goes on with its own next round.
  void set_round(uint64_t round) override;
  void note_rows(const wire::FrameHeader&, uint64_t, const wire::PullTable&, wire::WireDType,
                 float*) const override {}
  void note_dense(const wire::FrameHeader&, uint64_t, wire::WireDType, Buffer*) const override {}
  void add_stats(ServerStats*) const override {}

 private:
  // Null for ranks that no group holds, of trainers that came later and never opened this set.
  RoundGroup* find_group(uint32_t rank) const;
  // Runs `action` on the group of `rank`, if it has one. What breaks the set is told to all groups.
  template <typename Action>
  void in_group(uint32_t rank, Outbox& outbox, Action&& action);
  void require_not_lost() const;

  ParamState& state_;
  std::vector<std::unique_ptr<RoundGroup>> groups_;
};

}  // namespace cpudist::server
