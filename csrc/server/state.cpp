// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/state.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "server/replies.h"

namespace cpudist::server {
namespace {

// Of a table, for each row of an update: the hand comes round while a quarter of them is pushed.
constexpr uint64_t kLookAt = 4;
constexpr uint64_t kLeastLook = 1024;
// Freeing so many rows takes some tens of milliseconds.
constexpr uint64_t kMostFreed = uint64_t{1} << 14;

uint64_t rows_of(const Pushes& pushes, uint32_t table) {
  uint64_t rows = 0;
  for (const auto& [rank, push] : pushes) {
    for (const wire::TableSection& section : push.view.tables) {
      if (section.table == table) rows += section.keys.size();
    }
  }
  return rows;
}

}  // namespace

ParamState::ParamState(uint32_t param_set, const wire::ParamSetLayout& decoded,
                       ServerShared& of_server)
    : id(param_set),
      layout(decoded),
      tensor_count(wire::parameter_count(layout) + layout.tables.size()),
      shared(of_server),
      refused_(payload_of(no_memory("it has none left"))),
      halved_(half_way("it has no memory left")),
      halved_payload_(payload_of(halved_)) {}

ParamState::~ParamState() = default;

void ParamState::count_update(const Pushes& pushes) {
  ++version.round;
  for (const auto& [rank, push] : pushes) {
    version.samples += push.view.header.samples;
    version.steps += push.view.header.steps;
    markers.pushed(rank, push.ticket.incarnation);
  }
  shared.counters.rounds.fetch_add(1);
}

void ParamState::sweep(const Pushes& pushes, const Freeing& freeing) noexcept {
  for (const auto& table : store.tables) {
    if (!table->evicts()) continue;
    const uint64_t rows = rows_of(pushes, table->id());
    try {
      sweep(*table, std::max(kLeastLook, kLookAt * rows), std::max(kMostFreed, rows), freeing);
    } catch (const std::bad_alloc&) {
      continue;
    }
  }
}

table::Swept ParamState::sweep(table::Table& table, uint64_t records, uint64_t most,
                               const Freeing& freeing) {
  const std::vector<uint32_t> in_use = records_in_use(table.id());
  table::Sweep sweep;
  sweep.updates = version.round;
  sweep.now = Clock::now();
  sweep.records = records;
  sweep.most = most;
  sweep.used = in_use;
  const table::Swept swept = table.sweep(sweep);
  if (swept.freed.empty()) return swept;
  gone[table.id()]->add(swept.freed);
  freeing(table, swept.freed);
  return swept;
}

// In order.
std::vector<uint32_t> ParamState::records_in_use(uint32_t table) const {
  std::vector<uint32_t> records;
  for (const Pushes* pushes : merged) {
    for (const auto& [rank, push] : *pushes) {
      for (size_t i = 0; i < push.sections.size(); ++i) {
        if (push.view.tables[i].table != table) continue;
        const std::vector<int32_t>& some = push.sections[i].records;
        records.insert(records.end(), some.begin(), some.end());
      }
    }
  }
  std::sort(records.begin(), records.end());
  return records;
}

Buffer ParamState::fetch(const wire::FetchRequest& request) const {
  std::vector<wire::BlockRef> blocks;
  for (const auto& block : store.blocks) {
    if (!request.blocks || block == nullptr) continue;
    const bool wanted =
        request.parameter == wire::kEveryParameter || request.parameter == block->spec().parameter;
    if (!wanted) continue;
    blocks.push_back({block->id(), block->weight().size(), block->state().size(), block->step()});
  }
  std::vector<wire::TableRef> tables;
  if (!request.keys.empty()) {
    if (request.table >= store.tables.size()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          "parameter set " + std::to_string(id) + " has no table " + std::to_string(request.table));
    }
    const table::Table& table = *store.tables[request.table];
    tables.push_back({request.table, request.keys.size(), table.dim(), table.state_elements(), true,
                      table.step()});
  }
  wire::FilledStore reply = wire::layout_store(blocks, tables, shared.memory.pool());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const table::DenseBlock& block = *store.blocks[blocks[i].block];
    if (!block.weight().empty()) {
      std::memcpy(reply.block_weights[i], block.weight().data(), block.weight().size());
    }
    if (!block.state().empty()) {
      std::memcpy(reply.block_state[i], block.state().data(), block.state().size());
    }
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    std::memcpy(reply.keys[i], request.keys.data(), request.keys.size_bytes());
    store.tables[request.table]->fetch(request.keys, reply.weights[i], reply.state[i],
                                       reply.counts[i]);
  }
  return std::move(reply.payload);
}

Buffer ParamState::fetch_run(const wire::FetchRun& request) const {
  const table::Table& table = *store.tables[request.table];
  wire::RunRef ref;
  ref.table = request.table;
  ref.dim = table.dim();
  ref.begin = request.begin;
  ref.end = request.end;
  ref.rows = table.owned_rows(request.begin, request.end);
  ref.state_elements = table.state_elements();
  ref.counts = true;
  ref.step = table.step();
  wire::FilledRun reply = wire::layout_run(ref, shared.memory.pool());
  table.fetch(request, reply.weights, reply.state, reply.counts);
  return std::move(reply.payload);
}

wire::TableCounts ParamState::table_counts(const wire::TableQuery& query) const {
  const table::Table& table = table_of(query);
  wire::TableCounts counts;
  counts.rows = table.row_count();
  counts.bytes = table.size_bytes();
  counts.created = table.made_count();
  counts.filtered = table.admission().dropped_rows();
  counts.evicted = table.evicted_count();
  counts.unknown_reads = table.unknown_reads();
  return counts;
}

table::Table& ParamState::table_of(const wire::TableQuery& query) const {
  if (query.table < store.tables.size()) return *store.tables[query.table];
  throw Error(ErrorCode::kInvalidArgument, "parameter set " + std::to_string(id) +
                                               " has no table " + std::to_string(query.table));
}

void ParamState::forget_gone() const noexcept {
  for (const auto& keys : gone) {
    if (keys != nullptr) keys->drop();
  }
}

void ParamState::set_version(const wire::Version& loaded) {
  for (const auto& block : store.blocks) {
    if (block != nullptr) block->renumber(version.round, loaded.round);
  }
  for (const auto& table : store.tables) table->renumber(version.round, loaded.round);
  version = loaded;
  markers.restart();
}

std::vector<uint32_t> ParamState::every_block() const {
  std::vector<uint32_t> blocks;
  for (const auto& block : store.blocks) {
    if (block != nullptr) blocks.push_back(block->id());
  }
  return blocks;
}

Buffer ParamState::dense_values(const std::vector<uint32_t>& blocks) const {
  return std::move(fill_dense(blocks, {}).payload);
}

Buffer ParamState::coded_dense_values(const std::vector<uint32_t>& blocks,
                                      wire::WireDType dtype) const {
  std::vector<wire::DenseSection> sections;
  sections.reserve(blocks.size());
  for (const uint32_t block : blocks) {
    const auto weight = store.blocks[block]->weight();
    sections.push_back({block, {weight.data(), weight.size()}});
  }
  return code_dense(version, markers.wanted(), sections, layout, {dtype, dtype},
                    shared.memory.pool());
}

Buffer ParamState::dense_averages() const {
  const std::vector<uint32_t> blocks = every_block();
  wire::FilledPush reply = fill_dense(blocks, {});
  for (size_t i = 0; i < blocks.size(); ++i) {
    store.blocks[blocks[i]]->read_average(version.round, reply.blocks[i]);
  }
  return std::move(reply.payload);
}

wire::FilledPush ParamState::fill_dense(const std::vector<uint32_t>& blocks,
                                        std::span<const wire::TableRef> tables) const {
  std::vector<wire::BlockRef> refs;
  refs.reserve(blocks.size());
  for (const uint32_t block : blocks) {
    wire::BlockRef ref;
    ref.block = block;
    ref.size_bytes = store.blocks[block]->weight().size();
    refs.push_back(ref);
  }
  wire::FilledPush reply =
      wire::layout_dense(version, refs, shared.memory.pool(), tables, markers.wanted());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto weight = store.blocks[blocks[i]]->weight();
    if (!weight.empty()) std::memcpy(reply.blocks[i], weight.data(), weight.size());
  }
  return reply;
}

Answer ParamState::form_of(const SharedPayload& plain, wire::SectionKind kind, const Push& push,
                           CodedForms* made) const {
  if (!push.coding) return plain;
  SharedPayload& coded = (*made)[push.coding->reply];
  if (coded == nullptr) {
    const wire::Coding coding{push.coding->reply, push.coding->reply};
    coded = std::make_shared<const Buffer>(
        code_sections(kind, plain->bytes(), layout, coding, shared.memory.pool()));
  }
  return {coded, true};
}

void ParamState::answer_round(const Ticket& ticket, uint64_t round, Outbox& outbox) const {
  shared.sequencer.finish(ticket, encode(wire::RoundReply{round, ready, takes_parts()}), outbox);
}

bool ParamState::takes_parts() const {
  return layout.mode == wire::UpdateMode::kRounds && !shared.memory.limited();
}

Error ParamState::no_memory(const char* cause) const {
  return {ErrorCode::kOverloaded,
          "an update of parameter set " + std::to_string(id) + " finds no memory on server " +
              std::to_string(shared.options.shard_id) + ": " + cause +
              "; nothing of it was applied. Use more servers, or hosts with more memory"};
}

SharedPayload ParamState::refusal(const std::exception& cause) const noexcept {
  try {
    const auto* told = dynamic_cast<const Error*>(&cause);
    return payload_of(told == nullptr ? no_memory(cause.what()) : *told);
  } catch (const std::bad_alloc&) {
    return refused_;
  }
}

Error ParamState::half_way(const char* cause) const {
  return {ErrorCode::kInternal, "applying an update of parameter set " + std::to_string(id) +
                                    " failed half way on server " +
                                    std::to_string(shared.options.shard_id) + ": " + cause +
                                    "; its values cannot be used any more. Start again"};
}

SharedPayload ParamState::break_off(const std::exception& cause) noexcept {
  try {
    const Error error = half_way(cause.what());
    SharedPayload payload = payload_of(error);
    broken = error;
    return payload;
  } catch (const std::bad_alloc&) {
    broken = halved_;
    return halved_payload_;
  }
}

SharedPayload ParamState::broken_payload() const noexcept {
  try {
    return payload_of(*broken);
  } catch (const std::bad_alloc&) {
    return halved_payload_;
  }
}

}  // namespace cpudist::server
