// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/geo/change_log.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cpudist::server {

void ChangeLog::follow(uint32_t rank) {
  members_.insert(rank);
  rows_.follow(rank);
}

void ChangeLog::forget(uint32_t rank) {
  members_.erase(rank);
  rows_.forget(rank);
}

void ChangeLog::note(const Pushes& pushes) {
  const bool on_arrival = state_.layout.mode == wire::UpdateMode::kOnArrival;
  for (const auto& [rank, push] : pushes) {
    const uint32_t knows = on_arrival ? rank : ChangedRows::kNobody;
    for (size_t i = 0; i < push.view.tables.size(); ++i) {
      rows_.mark(knows, push.view.tables[i].table, push.sections[i].records);
    }
  }
}

void ChangeLog::check_push(const wire::PushHeader& header) const {
  if (header.clip_value == 0.0 && header.clip_norm == 0.0) return;
  throw Error(ErrorCode::kInvalidArgument, "deltas are not clipped on servers");
}

std::map<uint32_t, Answer> ChangeLog::answers(const Pushes& pushes, const std::vector<uint32_t>&) {
  std::map<uint32_t, Answer> found;
  for (const auto& [rank, push] : pushes) {
    ParamState::CodedForms own;
    found[rank] = state_.form_of(reply(rank), wire::SectionKind::kChanges, push, &own);
  }
  return found;
}

SharedPayload ChangeLog::reply(uint32_t rank) {
  wire::ChangesHeader header;
  header.version = state_.version;
  header.members = static_cast<uint32_t>(members_.size());
  std::vector<wire::TableRef> tables;
  std::vector<std::vector<uint32_t>> records;
  uint64_t left_bytes = state_.shared.options.changes_bytes;
  for (const auto& table : state_.store.tables) {
    const uint64_t row_bytes = sizeof(int64_t) + uint64_t{table->dim()} * sizeof(float);
    // At least one row, so that every reply gets further.
    const uint64_t limit = std::max<uint64_t>(left_bytes / row_bytes, 1);
    records.push_back(rows_.take(rank, table->id(), limit, &header.more));
    left_bytes -= std::min(left_bytes, records.back().size() * row_bytes);
    wire::TableRef ref;
    ref.table = table->id();
    ref.row_count = records.back().size();
    ref.dim = table->dim();
    tables.push_back(ref);
  }
  std::vector<wire::BlockRef> blocks;
  for (const uint32_t block : state_.every_block()) {
    blocks.push_back({block, state_.store.blocks[block]->weight().size()});
  }
  header.cut_wanted = state_.markers.wanted();
  wire::FilledPush reply =
      wire::layout_changes(header, blocks, tables, state_.shared.memory.pool());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto weight = state_.store.blocks[blocks[i].block]->weight();
    if (!weight.empty()) std::memcpy(reply.blocks[i], weight.data(), weight.size());
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    const table::Table& table = *state_.store.tables[i];
    for (size_t row = 0; row < records[i].size(); ++row) {
      const uint32_t record = records[i][row];
      reply.keys[i][row] = table.header(record).key;
      std::memcpy(reply.rows[i] + row * table.dim(), table.weight(record),
                  size_t{table.dim()} * sizeof(float));
    }
  }
  return std::make_shared<const Buffer>(std::move(reply.payload));
}

}  // namespace cpudist::server
