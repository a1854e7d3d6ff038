// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Opening, storing, reading and closing. Pushes stand in param_set_rounds.cpp, membership in
// param_set_members.cpp.

#include "server/param_set.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "server/change_log.h"
#include "server/layout_checks.h"
#include "wire/codec/values.h"

namespace cpudist::server {

ParamSet::ParamSet(uint32_t id, Buffer layout_bytes, uint32_t opener,
                   const std::vector<uint32_t>& active, ServerShared& shared)
    : layout_bytes_(std::move(layout_bytes)),
      opener_(opener),
      state_(id, decode_frame([&] { return wire::decode_layout(bytes_of(layout_bytes_)); }),
             shared),
      update_(state_.store, shared.updates),
      compensator_(make_compensator(id, state_.layout)) {
  const ServerOptions& options = shared.options;
  const wire::ParamSetLayout& layout = state_.layout;
  check_layout(layout, options);
  for (uint32_t table = 0; table < layout.tables.size(); ++table) {
    const wire::TableSpec& spec = layout.tables[table];
    state_.store.tables.push_back(std::make_unique<table::Table>(
        id, table, spec, layout.configs[spec.group], options.shard_id, options.server_count));
  }
  state_.store.blocks.resize(layout.blocks.size());
  for (uint32_t block = 0; block < layout.blocks.size(); ++block) {
    const wire::BlockSpec& spec = layout.blocks[block];
    if (spec.shard != options.shard_id) continue;
    state_.store.blocks[block] =
        std::make_unique<table::DenseBlock>(block, spec, layout.configs[spec.group]);
  }
  const std::set<uint32_t> members(active.begin(), active.end());
  for (uint32_t rank = 0; rank < options.trainer_count; ++rank) {
    if (!members.contains(rank)) closed_.insert(rank);
  }
  if (in_rounds()) make_groups(members);
  if (layout.exchanges_deltas) state_.changes = std::make_unique<ChangeLog>(state_, members);
}

ParamSet::~ParamSet() { state_.release(arrivals_); }

void ParamSet::open(const Ticket& ticket, const Buffer& layout_bytes, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  const bool equal =
      layout_bytes.size() == layout_bytes_.size() &&
      std::memcmp(layout_bytes.data(), layout_bytes_.data(), layout_bytes.size()) == 0;
  if (!equal) {
    const auto other = decode_frame([&] { return wire::decode_layout(bytes_of(layout_bytes)); });
    const Error mismatch(ErrorCode::kConfigMismatch,
                         "parameter set " + std::to_string(state_.id) + ": " +
                             describe_difference(state_.layout, other) + " (trainer " +
                             std::to_string(opener_) + " against trainer " +
                             std::to_string(ticket.rank) +
                             "); all trainers must build the same model and optimizer, by the same "
                             "strategy");
    // Nobody is to wait for the one that differs.
    if (!state_.ready || in_rounds()) refuse_all(mismatch, outbox);
    throw mismatch;
  }
  if (!state_.shared.sequencer.is_current(ticket)) return;
  if (in_rounds()) {
    // A round without a trainer that may come back would have a smaller divisor.
    if (const auto lost = state_.shared.peers.find_lost()) throw *lost;
  }
  if (in_rounds() && ticket.rank >= state_.shared.options.trainer_count) {
    throw Error(ErrorCode::kConfigMismatch,
                "trainer " + std::to_string(ticket.rank) + " joins a run of " +
                    std::to_string(state_.shared.options.trainer_count) +
                    " trainers (CPUDIST_TRAINERS) in parameter set " + std::to_string(state_.id) +
                    ", whose rounds wait for exactly those; only Async takes more");
  }
  if (closed_.contains(ticket.rank) || !opened_.insert(ticket.rank).second) {
    throw Error(ErrorCode::kProtocol, "trainer " + std::to_string(ticket.rank) +
                                          " opened parameter set " + std::to_string(state_.id) +
                                          " twice");
  }
  answer_round(ticket, outbox);
}

void ParamSet::refuse_all(const Error& error, Outbox& outbox) {
  state_.broken = error;
  for (const auto& group : groups_) group->fail_waiting(error, outbox);
  for (const auto& [rank, waiting] : waiting_ready_)
    state_.shared.sequencer.finish(waiting, error, outbox);
  waiting_ready_.clear();
}

void ParamSet::require_open(uint32_t rank) const {
  if (opened_.contains(rank) && !closed_.contains(rank)) return;
  throw Error(ErrorCode::kInvalidArgument, "trainer " + std::to_string(rank) +
                                               " has not opened parameter set " +
                                               std::to_string(state_.id) + ", or has closed it");
}

void ParamSet::require_whole() const {
  if (state_.broken) throw Error(*state_.broken);
}

void ParamSet::require_ready() const {
  require_whole();
  if (state_.ready) return;
  throw Error(ErrorCode::kInvalidArgument,
              "parameter set " + std::to_string(state_.id) +
                  " is not ready: trainer 0 has not stored all its values yet");
}

void ParamSet::store(const Ticket& ticket, const Buffer& payload, Outbox& outbox) {
  if (ticket.rank != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "only trainer 0 stores values, not trainer " + std::to_string(ticket.rank));
  }
  const wire::StoreView view =
      decode_frame([&] { return wire::decode_store(bytes_of(payload), state_.layout); });
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  for (const wire::BlockValues& values : view.blocks) {
    if (state_.store.blocks[values.block] != nullptr) continue;
    const wire::BlockSpec& spec = state_.layout.blocks[values.block];
    throw Error(ErrorCode::kInvalidArgument, "block " + spec.name + " belongs to server " +
                                                 std::to_string(spec.shard) + ", not to server " +
                                                 std::to_string(state_.shared.options.shard_id));
  }
  if (compensator_) compensator_->forget_all();  // what moved is not what gradients moved
  for (const wire::BlockValues& values : view.blocks)
    state_.store.blocks[values.block]->store(values);
  for (const wire::TableRows& rows : view.tables) state_.store.tables[rows.table]->store(rows);
  answer_round(ticket, outbox);
}

void ParamSet::ready(const Ticket& ticket, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  require_whole();
  if (!state_.shared.sequencer.is_current(ticket)) return;
  if (state_.ready) {
    add_reader(ticket.rank);
    if (state_.changes) state_.changes->follow(ticket.rank);
    answer_round(ticket, outbox);
    return;
  }
  if (ticket.rank != 0) {
    if (closed_.contains(0)) {
      throw Error(ErrorCode::kClosed,
                  "trainer 0, whose model gives the initial values, has closed "
                  "parameter set " +
                      std::to_string(state_.id) + " or shut down before it was ready");
    }
    if (const auto lost = state_.shared.peers.find_lost({0})) throw *lost;
    waiting_ready_[ticket.rank] = ticket;
    return;
  }
  for (const auto& block : state_.store.blocks) {
    if (block != nullptr && !block->stored()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "block " + block->spec().name + " was not stored before ready");
    }
  }
  state_.ready = true;
  add_reader(ticket.rank);
  if (state_.changes) state_.changes->follow(ticket.rank);
  answer_round(ticket, outbox);
  for (const auto& [rank, waiting] : waiting_ready_) {
    try {
      add_reader(rank);
      if (state_.changes) state_.changes->follow(rank);
      answer_round(waiting, outbox);
    } catch (const Error& error) {
      state_.shared.sequencer.finish(waiting, error, outbox);
    }
  }
  waiting_ready_.clear();
}

void ParamSet::close(const Ticket& ticket, Outbox& outbox) {
  {
    const std::unique_lock lock(mutex_);
    require_open(ticket.rank);
  }
  mark_closed(ticket.rank, outbox);
  state_.shared.sequencer.finish(ticket, encode(wire::RoundReply{round_of(ticket.rank), true}),
                                 outbox);
}

void ParamSet::mark_closed(uint32_t rank, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  closed_.insert(rank);
  if (state_.changes) state_.changes->forget(rank);
  if (compensator_) compensator_->forget(rank);
  take_out(rank, outbox);
  if (rank != 0 || state_.ready) return;
  const Error error(ErrorCode::kClosed, "trainer 0 closed parameter set " +
                                            std::to_string(state_.id) + " before it was ready");
  for (const auto& [other, waiting] : waiting_ready_)
    state_.shared.sequencer.finish(waiting, error, outbox);
  waiting_ready_.clear();
}

bool ParamSet::unused(const std::vector<uint32_t>& remaining) const {
  const std::shared_lock lock(mutex_);
  return std::all_of(remaining.begin(), remaining.end(),
                     [this](uint32_t rank) { return closed_.contains(rank); });
}

Buffer ParamSet::pull_rows(const wire::FrameHeader& request, const Buffer& payload) const {
  uint64_t step = 0;
  wire::Decoded decoded;
  const auto wanted = decode_frame([&] {
    if (!request.coded) return wire::decode_pull(bytes_of(payload), state_.layout, &step);
    decoded = wire::decode_coded_pull(bytes_of(payload), state_.layout,
                                      wire::allocate_from(state_.shared.pool));
    return wire::decode_pull(bytes_of(decoded.payload), state_.layout, &step);
  });
  const wire::Coding coding{decoded.coding.reply, decoded.coding.reply};
  const std::shared_lock lock(mutex_);
  require_ready();
  std::vector<wire::TableRef> refs;
  refs.reserve(wanted.size());
  for (const wire::PullTable& pull : wanted) {
    wire::TableRef ref;
    ref.table = pull.table;
    ref.row_count = pull.keys.size();
    ref.dim = state_.layout.tables[pull.table].dim;
    refs.push_back(ref);
  }
  const bool in_place = request.coded && coding.values == wire::WireDType::kFloat32;
  wire::FilledRows reply =
      in_place ? wire::layout_coded_rows(coding, state_.version, refs, state_.shared.pool)
               : wire::layout_rows(state_.version, refs, state_.shared.pool);
  for (size_t i = 0; i < wanted.size(); ++i) {
    state_.store.tables[wanted[i].table]->gather(wanted[i].keys, reply.rows[i]);
    if (!compensator_) continue;
    round_rows(coding.values, reply.rows[i], refs[i].row_count, refs[i].dim);
    compensator_->note_rows(request.rank, step, request.request_id, wanted[i], reply.rows[i]);
  }
  if (in_place || !request.coded) return std::move(reply.payload);
  return code_rows(bytes_of(reply.payload), refs, coding, state_.shared.pool);
}

Buffer ParamSet::pull_dense(const wire::FrameHeader& request, const Buffer& payload) const {
  wire::Coding coding;
  const uint64_t step = decode_frame([&] {
    if (!request.coded) return wire::decode_pull_dense(bytes_of(payload));
    return wire::decode_coded_pull_dense(bytes_of(payload), &coding);
  });
  coding.values = coding.reply;
  const std::shared_lock lock(mutex_);
  require_ready();
  Buffer reply = state_.dense_values(state_.every_block());
  if (compensator_) {
    state_.round_dense(&reply, coding.values);
    compensator_->note_dense_pull(request.rank, step, request.request_id, state_.version.round,
                                  reply);
  }
  if (!request.coded) return reply;
  return code_sections(wire::SectionKind::kDense, bytes_of(reply), state_.layout, coding,
                       state_.shared.pool);
}

Buffer ParamSet::fetch(const Buffer& payload) const {
  const wire::FetchRequest request =
      decode_frame([&] { return wire::decode_fetch(bytes_of(payload)); });
  const std::shared_lock lock(mutex_);
  require_ready();
  std::vector<wire::BlockRef> blocks;
  for (const auto& block : state_.store.blocks) {
    if (!request.blocks || block == nullptr) continue;
    const bool wanted =
        request.parameter == wire::kEveryParameter || request.parameter == block->spec().parameter;
    if (!wanted) continue;
    blocks.push_back({block->id(), block->weight().size(), block->state().size(), block->step()});
  }
  std::vector<wire::TableRef> tables;
  if (!request.keys.empty()) {
    if (request.table >= state_.store.tables.size()) {
      throw Error(ErrorCode::kInvalidArgument, "parameter set " + std::to_string(state_.id) +
                                                   " has no table " +
                                                   std::to_string(request.table));
    }
    const table::Table& table = *state_.store.tables[request.table];
    tables.push_back({request.table, request.keys.size(), table.dim(), table.state_elements(), true,
                      table.step()});
  }
  wire::FilledStore reply = wire::layout_store(blocks, tables, state_.shared.pool);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const table::DenseBlock& block = *state_.store.blocks[blocks[i].block];
    if (!block.weight().empty()) {
      std::memcpy(reply.block_weights[i], block.weight().data(), block.weight().size());
    }
    if (!block.state().empty()) {
      std::memcpy(reply.block_state[i], block.state().data(), block.state().size());
    }
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    std::memcpy(reply.keys[i], request.keys.data(), request.keys.size_bytes());
    state_.store.tables[request.table]->fetch(request.keys, reply.weights[i], reply.state[i],
                                              reply.counts[i]);
  }
  return std::move(reply.payload);
}

void ParamSet::add_stats(ServerStats* stats) const {
  const std::shared_lock lock(mutex_);
  if (state_.changes) stats->marks_bytes += state_.changes->size_bytes();
  if (compensator_) stats->backup_bytes += compensator_->size_bytes();
  for (const auto& table : state_.store.tables) {
    stats->rows += table->row_count();
    stats->table_bytes += table->size_bytes();
  }
  for (const auto& block : state_.store.blocks) {
    if (block != nullptr) stats->dense_bytes += block->size_bytes();
  }
}

}  // namespace cpudist::server
