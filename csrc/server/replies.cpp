// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/replies.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cpudist::server {

std::map<uint32_t, Answer> ValueReplies::answers(const Pushes& pushes,
                                                 const std::vector<uint32_t>& blocks) {
  std::map<uint32_t, Answer> found;
  SharedPayload common;  // of all who hold no rows
  ParamState::CodedForms forms;
  for (const auto& [rank, push] : pushes) {
    if (!push.held.empty()) {
      ParamState::CodedForms own;
      found[rank] = state_.form_of(held_reply(blocks, push), wire::SectionKind::kDense, push, &own);
      continue;
    }
    if (common == nullptr) {
      common = std::make_shared<const Buffer>(state_.dense_values(blocks));
    }
    found[rank] = state_.form_of(common, wire::SectionKind::kDense, push, &forms);
  }
  return found;
}

SharedPayload ValueReplies::held_reply(const std::vector<uint32_t>& blocks,
                                       const Push& push) const {
  const wire::PushHolds& holds = push.view.holds;
  const uint64_t updates = state_.version.round - std::min(holds.since, state_.version.round);
  std::vector<wire::TableRef> refs;
  std::vector<std::vector<uint32_t>> changed;
  for (size_t i = 0; i < holds.tables.size(); ++i) {
    const table::Table& table = *state_.store.tables[holds.tables[i].table];
    auto& records = changed.emplace_back();
    for (size_t j = 0; j < push.held[i].size(); ++j) {
      uint32_t record = push.held[i][j];
      // It may have been made since; else it is what its holder has.
      if (record == table::RowIndex::kNone)
        table.find(holds.tables[i].keys.subspan(j, 1), &record, nullptr);
      if (record == table::RowIndex::kNone) continue;
      // A row says the low half of its last update: how long ago that is, if not 2^32 updates.
      const table::RowHeader& header = table.header(record);
      const uint32_t ago = static_cast<uint32_t>(state_.version.round) - 1 - header.last_seen;
      if (header.count > 0 && ago < updates) records.push_back(record);
    }
    wire::TableRef& ref = refs.emplace_back();
    ref.table = table.id();
    ref.dim = table.dim();
    ref.row_count = records.size();
  }
  wire::FilledPush reply = state_.fill_dense(blocks, refs);
  for (size_t i = 0; i < refs.size(); ++i) {
    const table::Table& table = *state_.store.tables[refs[i].table];
    for (size_t j = 0; j < changed[i].size(); ++j) {
      reply.keys[i][j] = table.header(changed[i][j]).key;
      std::memcpy(reply.rows[i] + j * table.dim(), table.weight(changed[i][j]),
                  table.dim() * sizeof(float));
    }
  }
  return std::make_shared<const Buffer>(std::move(reply.payload));
}

}  // namespace cpudist::server
