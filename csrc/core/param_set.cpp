// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Opening, storing, reading and closing. Rounds stand in param_set_rounds.cpp, membership in
// param_set_members.cpp.

#include "core/param_set.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

namespace cpudist::core {

ParamSet::ParamSet(uint32_t id, Buffer layout_bytes, uint32_t opener,
                   const std::vector<uint32_t>& active, ServerShared& shared)
    : id_(id),
      layout_bytes_(std::move(layout_bytes)),
      layout_(decode_frame([&] { return decode_layout(bytes_of(layout_bytes_)); })),
      opener_(opener),
      shared_(shared),
      update_(store_, shared.updates),
      changed_rows_(layout_.tables.size()) {
  const ServerOptions& options = shared.options;
  check_layout(layout_, options);
  for (uint32_t table = 0; table < layout_.tables.size(); ++table) {
    const TableSpec& spec = layout_.tables[table];
    store_.tables.push_back(std::make_unique<Table>(id, table, spec, layout_.configs[spec.group],
                                                    options.shard_id, options.server_count));
  }
  store_.blocks.resize(layout_.blocks.size());
  for (uint32_t block = 0; block < layout_.blocks.size(); ++block) {
    const BlockSpec& spec = layout_.blocks[block];
    if (spec.shard != options.shard_id) continue;
    store_.blocks[block] = std::make_unique<DenseBlock>(block, spec, layout_.configs[spec.group]);
  }
  members_.insert(active.begin(), active.end());
  for (uint32_t rank = 0; rank < options.trainer_count; ++rank) {
    if (!members_.contains(rank)) closed_.insert(rank);
  }
}

ParamSet::~ParamSet() { clear_pushes(); }

void ParamSet::open(const Ticket& ticket, const Buffer& layout_bytes, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  const bool equal =
      layout_bytes.size() == layout_bytes_.size() &&
      std::memcmp(layout_bytes.data(), layout_bytes_.data(), layout_bytes.size()) == 0;
  if (!equal) {
    const auto other = decode_frame([&] { return decode_layout(bytes_of(layout_bytes)); });
    const Error mismatch(ErrorCode::kConfigMismatch,
                         "parameter set " + std::to_string(id_) + ": " +
                             describe_difference(layout_, other) + " (trainer " +
                             std::to_string(opener_) + " against trainer " +
                             std::to_string(ticket.rank) +
                             "); all trainers must build the same model and optimizer");
    if (!ready_) refuse_all(mismatch, outbox);  // nobody is to wait for the one that differs
    throw mismatch;
  }
  if (!shared_.peers.is_current(ticket)) return;
  if (in_rounds()) {
    // A round without a trainer that may come back would have a smaller divisor.
    if (const auto lost = shared_.peers.find_lost()) throw *lost;
  }
  if (in_rounds() && ticket.rank >= shared_.options.trainer_count) {
    throw Error(ErrorCode::kConfigMismatch,
                "trainer " + std::to_string(ticket.rank) + " joins a run of " +
                    std::to_string(shared_.options.trainer_count) +
                    " trainers (CPUDIST_TRAINERS) in parameter set " + std::to_string(id_) +
                    ", whose rounds wait for exactly those; only Async takes more");
  }
  if (closed_.contains(ticket.rank) || !opened_.insert(ticket.rank).second) {
    throw Error(ErrorCode::kProtocol, "trainer " + std::to_string(ticket.rank) +
                                          " opened parameter set " + std::to_string(id_) +
                                          " twice");
  }
  answer_round(ticket, round_, outbox);
}

void ParamSet::refuse_all(const Error& error, Outbox& outbox) {
  broken_ = error;
  for (const auto& [rank, waiting] : waiting_ready_) shared_.peers.finish(waiting, error, outbox);
  waiting_ready_.clear();
}

void ParamSet::require_open(uint32_t rank) const {
  if (opened_.contains(rank) && !closed_.contains(rank)) return;
  throw Error(ErrorCode::kInvalidArgument, "trainer " + std::to_string(rank) +
                                               " has not opened parameter set " +
                                               std::to_string(id_) + ", or has closed it");
}

void ParamSet::require_whole() const {
  if (broken_) throw Error(*broken_);
}

void ParamSet::require_ready() const {
  require_whole();
  if (ready_) return;
  throw Error(ErrorCode::kInvalidArgument,
              "parameter set " + std::to_string(id_) +
                  " is not ready: trainer 0 has not stored all its values yet");
}

void ParamSet::store(const Ticket& ticket, const Buffer& payload, Outbox& outbox) {
  if (ticket.rank != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "only trainer 0 stores values, not trainer " + std::to_string(ticket.rank));
  }
  const StoreView view = decode_frame([&] { return decode_store(bytes_of(payload), layout_); });
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  for (const BlockValues& values : view.blocks) {
    if (store_.blocks[values.block] != nullptr) continue;
    const BlockSpec& spec = layout_.blocks[values.block];
    throw Error(ErrorCode::kInvalidArgument, "block " + spec.name + " belongs to server " +
                                                 std::to_string(spec.shard) + ", not to server " +
                                                 std::to_string(shared_.options.shard_id));
  }
  for (const BlockValues& values : view.blocks) store_.blocks[values.block]->store(values);
  for (const TableRows& rows : view.tables) store_.tables[rows.table]->store(rows);
  answer_round(ticket, round_, outbox);
}

void ParamSet::ready(const Ticket& ticket, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  require_whole();
  if (!shared_.peers.is_current(ticket)) return;
  if (ready_) {
    add_reader(ticket.rank);
    follow(ticket.rank);
    answer_round(ticket, round_, outbox);
    return;
  }
  if (ticket.rank != 0) {
    if (closed_.contains(0)) {
      throw Error(ErrorCode::kClosed,
                  "trainer 0, whose model gives the initial values, has closed "
                  "parameter set " +
                      std::to_string(id_) + " or shut down before it was ready");
    }
    if (const auto lost = shared_.peers.find_lost({0})) throw *lost;
    waiting_ready_[ticket.rank] = ticket;
    return;
  }
  for (const auto& block : store_.blocks) {
    if (block != nullptr && !block->stored()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "block " + block->spec().name + " was not stored before ready");
    }
  }
  ready_ = true;
  add_reader(ticket.rank);
  follow(ticket.rank);
  answer_round(ticket, round_, outbox);
  for (const auto& [rank, waiting] : waiting_ready_) {
    try {
      add_reader(rank);
      follow(rank);
      answer_round(waiting, round_, outbox);
    } catch (const Error& error) {
      shared_.peers.finish(waiting, error, outbox);
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
  shared_.peers.finish(ticket, encode(RoundReply{round(), true}), outbox);
}

void ParamSet::mark_closed(uint32_t rank, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  closed_.insert(rank);
  changed_rows_.forget(rank);
  take_out(rank, outbox);
  if (rank != 0 || ready_) return;
  const Error error(ErrorCode::kClosed, "trainer 0 closed parameter set " + std::to_string(id_) +
                                            " before it was ready");
  for (const auto& [other, waiting] : waiting_ready_) shared_.peers.finish(waiting, error, outbox);
  waiting_ready_.clear();
}

bool ParamSet::unused(const std::vector<uint32_t>& remaining) const {
  const std::shared_lock lock(mutex_);
  return std::all_of(remaining.begin(), remaining.end(),
                     [this](uint32_t rank) { return closed_.contains(rank); });
}

Buffer ParamSet::pull_rows(const Buffer& payload) const {
  const auto wanted = decode_frame([&] { return decode_pull(bytes_of(payload), layout_); });
  const std::shared_lock lock(mutex_);
  require_ready();
  std::vector<TableRef> refs;
  refs.reserve(wanted.size());
  for (const PullTable& pull : wanted) {
    TableRef ref;
    ref.table = pull.table;
    ref.row_count = pull.keys.size();
    ref.dim = layout_.tables[pull.table].dim;
    refs.push_back(ref);
  }
  FilledRows reply = layout_rows(version(), refs, shared_.pool);
  for (size_t i = 0; i < wanted.size(); ++i) {
    store_.tables[wanted[i].table]->gather(wanted[i].keys, reply.rows[i]);
  }
  return std::move(reply.payload);
}

Buffer ParamSet::pull_dense() const {
  const std::shared_lock lock(mutex_);
  require_ready();
  std::vector<BlockRef> refs;
  for (const auto& block : store_.blocks) {
    if (block == nullptr) continue;
    BlockRef ref;
    ref.block = block->id();
    ref.size_bytes = block->weight().size();
    refs.push_back(ref);
  }
  FilledPush reply = layout_dense(version(), refs, shared_.pool);
  for (size_t i = 0; i < refs.size(); ++i) {
    const auto weight = store_.blocks[refs[i].block]->weight();
    if (!weight.empty()) std::memcpy(reply.blocks[i], weight.data(), weight.size());
  }
  return std::move(reply.payload);
}

Buffer ParamSet::fetch(const Buffer& payload) const {
  const FetchRequest request = decode_frame([&] { return decode_fetch(bytes_of(payload)); });
  const std::shared_lock lock(mutex_);
  require_ready();
  std::vector<BlockRef> blocks;
  for (const auto& block : store_.blocks) {
    if (!request.blocks || block == nullptr) continue;
    const bool wanted =
        request.parameter == kEveryParameter || request.parameter == block->spec().parameter;
    if (!wanted) continue;
    blocks.push_back({block->id(), block->weight().size(), block->state().size(), block->step()});
  }
  std::vector<TableRef> tables;
  if (!request.keys.empty()) {
    if (request.table >= store_.tables.size()) {
      throw Error(ErrorCode::kInvalidArgument, "parameter set " + std::to_string(id_) +
                                                   " has no table " +
                                                   std::to_string(request.table));
    }
    const Table& table = *store_.tables[request.table];
    tables.push_back({request.table, request.keys.size(), table.dim(), table.state_elements(), true,
                      table.step()});
  }
  FilledStore reply = layout_store(blocks, tables, shared_.pool);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const DenseBlock& block = *store_.blocks[blocks[i].block];
    if (!block.weight().empty()) {
      std::memcpy(reply.block_weights[i], block.weight().data(), block.weight().size());
    }
    if (!block.state().empty()) {
      std::memcpy(reply.block_state[i], block.state().data(), block.state().size());
    }
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    std::memcpy(reply.keys[i], request.keys.data(), request.keys.size_bytes());
    store_.tables[request.table]->fetch(request.keys, reply.weights[i], reply.state[i],
                                        reply.counts[i]);
  }
  return std::move(reply.payload);
}

uint64_t ParamSet::round() const {
  const std::shared_lock lock(mutex_);
  return round_;
}

void ParamSet::add_stats(ServerStats* stats) const {
  const std::shared_lock lock(mutex_);
  for (const auto& table : store_.tables) {
    stats->rows += table->row_count();
    stats->table_bytes += table->size_bytes();
  }
  for (const auto& block : store_.blocks) {
    if (block != nullptr) stats->dense_bytes += block->size_bytes();
  }
}

void ParamSet::answer_round(const Ticket& ticket, uint64_t round, Outbox& outbox) {
  shared_.peers.finish(ticket, encode(RoundReply{round, ready_}), outbox);
}

}  // namespace cpudist::core
