// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/replies.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cpudist::server {
namespace {

// A row that its holder is to be told of.
struct Changed {
  size_t place;     // among those that are held
  uint32_t record;  // kNone: it has lost its place
};

}  // namespace

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
    SharedPayload& form = push.coding ? forms[push.coding->reply] : common;
    if (form == nullptr) {
      form = std::make_shared<const Buffer>(
          push.coding ? state_.coded_dense_values(blocks, push.coding->reply)
                      : state_.dense_values(blocks));
    }
    found[rank] = {form, push.coding.has_value()};
  }
  return found;
}

SharedPayload ValueReplies::held_reply(const std::vector<uint32_t>& blocks,
                                       const Push& push) const {
  const wire::PushHolds& holds = push.view.holds;
  const uint64_t updates = state_.version.round - std::min(holds.since, state_.version.round);
  std::vector<wire::TableRef> refs;
  std::vector<std::vector<Changed>> changed;
  for (size_t i = 0; i < holds.tables.size(); ++i) {
    const table::Table& table = *state_.store.tables[holds.tables[i].table];
    auto& rows = changed.emplace_back();
    for (size_t j = 0; j < push.held[i].size(); ++j) {
      uint32_t record = push.held[i][j];
      // It may have been made since.
      if (record == table::RowIndex::kNone)
        table.find(holds.tables[i].keys.subspan(j, 1), &record, nullptr);
      if (record == table::RowIndex::kNone) {
        // Else it is what its holder has.
        if (table.freed_since(holds.since)) rows.push_back({j, record});
        continue;
      }
      // A row says the low half of its last update: how long ago that is, if not 2^32 updates.
      const table::RowHeader& header = table.header(record);
      const uint32_t ago = static_cast<uint32_t>(state_.version.round) - 1 - header.last_seen;
      if (header.count > 0 && ago < updates) rows.push_back({j, record});
    }
    wire::TableRef& ref = refs.emplace_back();
    ref.table = table.id();
    ref.dim = table.dim();
    ref.row_count = rows.size();
  }
  wire::FilledPush reply = state_.fill_dense(blocks, refs);
  for (size_t i = 0; i < refs.size(); ++i) {
    const table::Table& table = *state_.store.tables[refs[i].table];
    for (size_t j = 0; j < changed[i].size(); ++j) {
      const auto [place, record] = changed[i][j];
      const auto key = holds.tables[i].keys.subspan(place, 1);
      float* const row = reply.rows[i] + j * table.dim();
      reply.keys[i][j] = key.front();
      if (record == table::RowIndex::kNone) {
        table.fill_unknown(key, row);  // nobody has read it
      } else {
        std::memcpy(row, table.weight(record), table.dim() * sizeof(float));
      }
    }
  }
  return std::make_shared<const Buffer>(std::move(reply.payload));
}

}  // namespace cpudist::server
