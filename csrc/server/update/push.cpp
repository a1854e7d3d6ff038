// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/update/push.h"

#include "server/layout/layout_checks.h"

namespace cpudist::server {
namespace {

std::string describe_settings(const wire::PushHeader& first, const wire::PushHeader& second) {
  const auto differ = [](const char* name, double a, double b) {
    return std::string(name) + ": " + show(a) + " against " + show(b);
  };
  if (first.by_samples != second.by_samples) {
    return std::string("one calls step(), the other step(samples=)");
  }
  if (first.clip_value != second.clip_value) {
    return differ("clip_value", first.clip_value, second.clip_value);
  }
  if (first.clip_norm != second.clip_norm) {
    return differ("clip_norm", first.clip_norm, second.clip_norm);
  }
  if (first.clip_each != second.clip_each) {
    return std::string("one clips each tensor by its own norm, the other all by one");
  }
  if (first.configs.size() != second.configs.size()) {
    return differ("number of parameter groups", static_cast<double>(first.configs.size()),
                  static_cast<double>(second.configs.size()));
  }
  for (size_t group = 0; group < first.configs.size(); ++group) {
    const std::string found = describe_difference(first.configs[group], second.configs[group]);
    if (!found.empty()) return "parameter group " + std::to_string(group) + ", " + found;
  }
  return "";
}

static_assert(static_cast<int32_t>(table::RowIndex::kNone) == kNoRecord);

SectionRows locate_section(const wire::TableSection& section, const table::Table& table) {
  const size_t count = section.keys.size();
  std::vector<uint32_t> records(count);
  std::vector<uint8_t> shards(count);
  table.find(section.keys, records.data(), shards.data());
  SectionRows rows;
  rows.sweeps = table.sweep_count();
  for (const uint8_t shard : shards) ++rows.offsets[shard + 1];
  for (uint32_t shard = 0; shard < table::Table::kShards; ++shard) {
    rows.offsets[shard + 1] += rows.offsets[shard];
  }
  auto cursor = rows.offsets;
  rows.order.resize(count);
  rows.records.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t at = cursor[shards[i]]++;
    rows.order[at] = static_cast<uint32_t>(i);
    rows.records[at] = static_cast<int32_t>(records[i]);
    if (records[i] == table::RowIndex::kNone) rows.missing.push_back(at);
  }
  return rows;
}

}  // namespace

void drop_missing(SectionRows* rows) noexcept {
  uint32_t kept = 0;
  uint32_t begin = 0;
  for (uint32_t shard = 0; shard < table::Table::kShards; ++shard) {
    const uint32_t end = rows->offsets[shard + 1];
    for (uint32_t at = begin; at < end; ++at) {
      if (rows->records[at] == kNoRecord) continue;
      rows->order[kept] = rows->order[at];
      rows->records[kept++] = rows->records[at];
    }
    begin = end;
    rows->offsets[shard + 1] = kept;
  }
  rows->order.resize(kept);
  rows->records.resize(kept);
}

std::vector<std::vector<uint32_t>> locate_held(const wire::PushView& view,
                                               const table::ParamStore& store) {
  std::vector<std::vector<uint32_t>> held;
  for (const wire::PullTable& rows : view.holds.tables) {
    auto& records = held.emplace_back(rows.keys.size(), table::RowIndex::kNone);
    const table::Table& table = *store.tables[rows.table];
    if (!table.evicts()) table.find(rows.keys, records.data(), nullptr);
  }
  return held;
}

std::vector<SectionRows> locate_rows(const wire::PushView& view, const table::ParamStore& store) {
  std::vector<SectionRows> sections;
  sections.reserve(view.tables.size());
  for (const wire::TableSection& section : view.tables) {
    sections.push_back(locate_section(section, *store.tables.at(section.table)));
  }
  return sections;
}

void locate_again(Pushes& pushes, const table::ParamStore& store) {
  for (auto& [rank, push] : pushes) {
    for (size_t i = 0; i < push.sections.size(); ++i) {
      const wire::TableSection& section = push.view.tables[i];
      const table::Table& table = *store.tables[section.table];
      if (push.sections[i].sweeps == table.sweep_count()) continue;
      push.sections[i] = locate_section(section, table);
    }
  }
}

std::optional<std::string> find_mismatch(const Pushes& pushes) {
  const auto& [first_rank, first] = *pushes.begin();
  for (const auto& [rank, push] : pushes) {
    const std::string found = describe_settings(first.view.header, push.view.header);
    if (found.empty()) continue;
    return found + " (trainer " + std::to_string(first_rank) + " against trainer " +
           std::to_string(rank) + "); all trainers must use the same settings in a round";
  }
  return std::nullopt;
}

}  // namespace cpudist::server
