// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A set that is updated on arrival: a push is applied as it comes, unless that would make the
// gradient that another trainer is computing older than max_staleness updates.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "server/arrivals/delay_compensator.h"
#include "server/policy.h"
#include "server/update/update.h"

namespace cpudist::server {

class Arrivals final : public UpdatePolicy {
 public:
  explicit Arrivals(ParamState& state);
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  bool needs_everyone() const override { return false; }
  bool sends_again() const override { return true; }  // their queues do
  uint64_t round_of(uint32_t rank) const override;
  std::vector<uint32_t> waiting_for(wire::FrameKind kind, uint32_t rank) const override;

  void check_open(uint32_t) const override {}
  void start(uint32_t rank) override;
  void join(const Ticket& ticket, const wire::Join& join, Outbox& outbox) override;
  void take_out(uint32_t rank, Outbox& outbox) override;
  void forget(uint32_t rank) override;
  void drop(uint32_t rank, Outbox& outbox) override;
  void add_members(const std::set<uint32_t>&) override {}
  void excuse(uint32_t rank, Outbox& outbox) override;
  void fail_waiting(const Error& error, Outbox& outbox) override;

  void check_push(const Ticket& ticket, const wire::PushHeader& header) const override;
  bool is_due(uint32_t rank) const override;
  void push(Push push, Outbox& outbox) override;
  bool has_pushes() const override { return !waiting_.empty(); }
  // Nobody waits for a push: who holds others by what it has read goes on, or leaves.
  void give_up(uint32_t, const Error&, Outbox&) override {}
  void commit(const Ticket& ticket, const Buffer& payload, Outbox& outbox) override;

  void values_stored() override;
  void rows_freed(const table::Table& table, std::span<const table::Freed> rows) override;
  void set_round(uint64_t round) override;
  void note_rows(const wire::FrameHeader& request, uint64_t step, const wire::PullTable& pull,
                 wire::WireDType dtype, float* rows) const override;
  void note_dense(const wire::FrameHeader& request, uint64_t step, wire::WireDType dtype,
                  Buffer* values) const override;
  void add_stats(ServerStats* stats) const override;

 private:
  bool bounded() const { return state_.layout.max_staleness != wire::kAnyStaleness; }
  // The update after which `rank` read; nothing where it has left, or without a bound.
  std::optional<uint64_t> read_of(uint32_t rank) const;
  void fail_waiting(const SharedPayload& error, Outbox& outbox);
  void apply_due(Outbox& outbox);
  void apply(uint32_t rank, Outbox& outbox);
  bool prepare(Pushes& one, Outbox& outbox);
  Answer compensated_answer(const Push& push, const std::vector<uint32_t>& blocks);
  void round_dense(Buffer* plain, wire::WireDType dtype) const;

  ParamState& state_;
  GradientUpdate update_;
  const std::unique_ptr<DelayCompensator> compensator_;  // null without delay compensation
  Pushes waiting_;
  // With a bound on staleness: rank -> update after which it read the values of its next gradient.
  std::map<uint32_t, uint64_t> readers_;
  // As readers_, of those who have marked a cut since: nobody waits for them until they push.
  std::map<uint32_t, uint64_t> excused_;
};

}  // namespace cpudist::server
