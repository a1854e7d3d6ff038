// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Sets whose trainers step by themselves and exchange deltas: the answer to a push brings what the
// other trainers have changed.

#include <algorithm>
#include <cstring>

#include "core/param_set.h"

namespace cpudist::core {
void ParamSet::note_changes(uint32_t rank, const RoundPush& push) {
  steps_ += push.view.header.steps;
  for (size_t i = 0; i < push.view.tables.size(); ++i) {
    changed_rows_.mark(rank, push.view.tables[i].table, push.sections[i].records);
  }
}

SharedPayload ParamSet::changes_reply(uint32_t rank) {
  ChangesHeader header;
  header.version = version();
  header.steps = steps_;
  header.members = static_cast<uint32_t>(members_.size());
  std::vector<BlockRef> blocks;
  for (const auto& block : store_.blocks) {
    if (block == nullptr) continue;
    BlockRef ref;
    ref.block = block->id();
    ref.size_bytes = block->weight().size();
    blocks.push_back(ref);
  }
  std::vector<TableRef> tables;
  std::vector<std::vector<uint32_t>> records;
  uint64_t left_bytes = shared_.options.changes_bytes;
  for (const auto& table : store_.tables) {
    const uint64_t row_bytes = sizeof(int64_t) + uint64_t{table->dim()} * sizeof(float);
    // At least one row, so that every reply gets further.
    const uint64_t limit = std::max<uint64_t>(left_bytes / row_bytes, 1);
    records.push_back(changed_rows_.take(rank, table->id(), limit, &header.more));
    left_bytes -= std::min(left_bytes, records.back().size() * row_bytes);
    TableRef ref;
    ref.table = table->id();
    ref.row_count = records.back().size();
    ref.dim = table->dim();
    tables.push_back(ref);
  }
  FilledPush reply = layout_changes(header, blocks, tables, shared_.pool);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto weight = store_.blocks[blocks[i].block]->weight();
    if (!weight.empty()) std::memcpy(reply.blocks[i], weight.data(), weight.size());
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    const Table& table = *store_.tables[i];
    for (size_t row = 0; row < records[i].size(); ++row) {
      const uint32_t record = records[i][row];
      reply.keys[i][row] = table.header(record).key;
      std::memcpy(reply.rows[i] + row * table.dim(), table.weight(record),
                  size_t{table.dim()} * sizeof(float));
    }
  }
  return std::make_shared<const Buffer>(std::move(reply.payload));
}

void ParamSet::follow(uint32_t rank) {
  if (!on_arrival()) return;
  members_.insert(rank);
  if (layout_.exchanges_deltas) changed_rows_.follow(rank);
}

}  // namespace cpudist::core
