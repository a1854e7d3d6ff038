// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A push as a server keeps it until it is applied: what came, and where its rows lie.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "server/counters.h"
#include "server/outbox.h"
#include "server/update/parts.h"
#include "table/store.h"
#include "wire/codec/codec.h"
#include "wire/messages.h"

namespace cpudist::server {

// Positions of a section's rows grouped by table shard, in batch order within a shard, and their
// records. Found when the push arrives, so that the last arriver need not look up everybody's rows.
struct SectionRows {
  std::vector<uint32_t> order;
  std::vector<int32_t> records;  // of position order[i]; of a remote table's new row kNoRecord
  std::array<uint32_t, table::Table::kShards + 1> offsets{};
  // In batch order: where in `records` there was none when the push arrived.
  std::vector<uint32_t> missing;
  uint64_t sweeps = 0;  // of the table until then
};
inline constexpr int32_t kNoRecord = -1;

struct Push {
  Ticket ticket;
  Buffer payload;        // what `view` points into; plain
  CountedBytes pending;  // those of the payload, until an update is made of it
  // How it came, and is to be answered, if it came coded.
  std::optional<wire::Coding> coding;
  wire::PushView view;
  std::vector<std::shared_ptr<const PushPart>> parts;  // what else it points into
  std::string nonfinite;  // what of it is infinite or NaN and is not to be applied, in words
  std::vector<SectionRows> sections;  // beside view.tables
  // Records, beside view.holds.tables; RowIndex::kNone where there was none when the push arrived,
  // and in tables that evict rows.
  std::vector<std::vector<uint32_t>> held;
};

using Pushes = std::map<uint32_t, Push>;  // by rank

// Rows that have no record are not applied: drops them.
void drop_missing(SectionRows* rows) noexcept;

// Looks up the rows of every table section. Throws kInvalidArgument for rows never stored in
// tables that are not remote.
std::vector<SectionRows> locate_rows(const wire::PushView& view, const table::ParamStore& store);

// Rows whose records may have been freed since they were looked up are looked up again. Throws as
// above.
void locate_again(Pushes& pushes, const table::ParamStore& store);

// The records of the rows that the sender holds. Throws as above.
std::vector<std::vector<uint32_t>> locate_held(const wire::PushView& view,
                                               const table::ParamStore& store);

// The first difference in hyper-parameters or clip settings between two pushes of a round, naming
// the field, both values and both ranks.
std::optional<std::string> find_mismatch(const Pushes& pushes);

}  // namespace cpudist::server
