// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Pushes and commits of a parameter set: what is checked before they reach their group's rounds.

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "server/layout_checks.h"
#include "server/param_set.h"

namespace cpudist::server {

void ParamSet::decode_push_into(RoundPush* push) const {
  const ServerShared& shared = state_.shared;
  const uint64_t coded_bytes = push->payload.size();
  uint64_t plain_bytes = 0;
  const auto allocate = [&](uint64_t size_bytes) {
    plain_bytes = size_bytes;
    if (shared.options.memory_cap_bytes == 0) return Buffer(size_bytes, shared.pool);
    // The coded bytes wait for these.
    const uint64_t waiting = shared.counters.pending_bytes.load() + coded_bytes;
    auto reservation = shared.pushes_memory->reserve(size_bytes, waiting);
    if (!reservation) return Buffer();
    return Buffer(size_bytes, shared.pushes_pool, std::move(*reservation));
  };
  try {
    wire::Decoded decoded = wire::decode_sections(wire::SectionKind::kPush, bytes_of(push->payload),
                                                  state_.layout, allocate);
    push->payload = std::move(decoded.payload);
    push->coding = decoded.coding;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kOverloaded) refuse_push(plain_bytes);
    throw MalformedFrame(error);
  }
}

void ParamSet::push(const Ticket& ticket, Buffer payload, bool coded, Outbox& outbox) {
  ServerShared& shared = state_.shared;
  RoundPush push;
  push.ticket = ticket;
  push.payload = std::move(payload);
  if (coded) decode_push_into(&push);
  push.view =
      decode_frame([&] { return wire::decode_push(bytes_of(push.payload), state_.layout); });
  const wire::PushHeader& header = push.view.header;
  const uint64_t size_bytes = push.payload.size();
  {
    // Rows are looked up while others push or pull; records never move.
    const std::shared_lock lock(mutex_);
    check_push(ticket, header, size_bytes);
    for (const wire::DenseSection& section : push.view.blocks) {
      if (state_.store.blocks[section.block] != nullptr) continue;
      throw Error(
          ErrorCode::kInvalidArgument,
          "push: block " + state_.layout.blocks[section.block].name + " belongs to another server");
    }
    push.sections = locate_rows(push.view, state_.store);
    push.held = locate_held(push.view, state_.store);
  }
  const std::unique_lock lock(mutex_);
  check_push(ticket, header, size_bytes);
  if (!shared.sequencer.is_current(ticket)) return;
  shared.counters.pushes.fetch_add(1);
  shared.counters.pending_bytes.fetch_add(size_bytes);
  if (on_arrival()) {
    add_arrival(std::move(push), outbox);
    return;
  }
  in_group(ticket.rank, outbox, [&](RoundGroup& group) { group.push(std::move(push), outbox); });
}

void ParamSet::check_push(const Ticket& ticket, const wire::PushHeader& header,
                          uint64_t size_bytes) const {
  require_open(ticket.rank);
  require_ready();
  if (const RoundGroup* group = find_group(ticket.rank)) {
    group->check_push(ticket.rank, header.round);
  } else if (arrivals_.contains(ticket.rank)) {
    throw Error(ErrorCode::kProtocol,
                "push of trainer " + std::to_string(ticket.rank) + " while its last one waits");
  }
  check_configs(header);
  if (state_.changes && (header.clip_value != 0.0 || header.clip_norm != 0.0)) {
    throw Error(ErrorCode::kInvalidArgument, "deltas are not clipped on servers");
  }
  if (in_rounds()) require_not_lost();
  const uint64_t waiting = state_.shared.counters.pending_bytes.load();
  const uint64_t cap = state_.shared.options.memory_cap_bytes;
  if (cap == 0 || (size_bytes <= cap && waiting <= cap - size_bytes)) return;
  // What the others wait for takes no more than its time.
  if (on_arrival() && size_bytes <= cap && may_apply(ticket.rank)) return;
  refuse_push(size_bytes);
}

void ParamSet::refuse_push(uint64_t size_bytes) const {
  const uint64_t cap = state_.shared.options.memory_cap_bytes;
  const std::string limit = "memory_cap_bytes = " + std::to_string(cap) +
                            "; set CPUDIST_SERVER_MEMORY_CAP_BYTES higher, or to 0";
  const std::string server = "server " + std::to_string(state_.shared.options.shard_id);
  // The queue of a trainer sends again what is refused as overload.
  if (on_arrival() && size_bytes > cap) {
    throw Error(ErrorCode::kInvalidArgument,
                "a push of " + std::to_string(size_bytes) + " bytes never fits on " + server +
                    ": it exceeds " + limit + ", or merge fewer steps");
  }
  const uint64_t held = std::max(state_.shared.counters.pending_bytes.load(),
                                 state_.shared.pushes_memory->used_bytes());
  throw Error(ErrorCode::kOverloaded,
              "pushes that come in or wait hold " + std::to_string(held) + " bytes on " + server +
                  "; with " + std::to_string(size_bytes) + " more they exceed " + limit);
}

void ParamSet::check_configs(const wire::PushHeader& header) const {
  for (size_t group = 0; group < header.configs.size(); ++group) {
    const kernels::OptimizerConfig& opened = state_.layout.configs[group];
    const kernels::OptimizerConfig& now = header.configs[group];
    const std::string where = "push: parameter group " + std::to_string(group) + ", ";
    if (now.kind != opened.kind ||
        kernels::state_elements(now, 4, 4) != kernels::state_elements(opened, 4, 4)) {
      throw Error(ErrorCode::kConfigMismatch,
                  where + describe_difference(opened, now) +
                      " (opened against pushed): the optimizer's state cannot change its shape");
    }
  }
}

void ParamSet::commit(const Ticket& ticket, const wire::Commit& commit, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  require_whole();
  if (on_arrival()) {
    throw Error(ErrorCode::kProtocol, "commit of trainer " + std::to_string(ticket.rank) +
                                          " in a set that is updated on arrival");
  }
  in_group(ticket.rank, outbox, [&](RoundGroup& group) { group.commit(ticket, commit, outbox); });
}

}  // namespace cpudist::server
