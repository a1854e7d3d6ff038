// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What is checked and planned around the arithmetic of round_merge.cpp.

#include "server/rounds/round.h"

#include <algorithm>
#include <charconv>
#include <set>

namespace cpudist::server {
namespace {

struct HyperField {
  const char* name;
  double kernels::OptimizerConfig::* member;
};
constexpr HyperField kHyperFields[] = {
    {"lr", &kernels::OptimizerConfig::lr},
    {"momentum", &kernels::OptimizerConfig::momentum},
    {"dampening", &kernels::OptimizerConfig::dampening},
    {"weight_decay", &kernels::OptimizerConfig::weight_decay},
    {"beta1", &kernels::OptimizerConfig::beta1},
    {"beta2", &kernels::OptimizerConfig::beta2},
    {"eps", &kernels::OptimizerConfig::eps},
    {"alpha", &kernels::OptimizerConfig::alpha},
    {"lr_decay", &kernels::OptimizerConfig::lr_decay},
    {"initial_accumulator", &kernels::OptimizerConfig::initial_accumulator},
    {"l1", &kernels::OptimizerConfig::l1},
    {"l2", &kernels::OptimizerConfig::l2},
    {"lr_power", &kernels::OptimizerConfig::lr_power},
};
static_assert(std::size(kHyperFields) == kernels::kOptimizerHyperCount);

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

SectionRows locate_section(const wire::TableSection& section, const table::Table& table) {
  const size_t count = section.keys.size();
  std::vector<uint32_t> records(count);
  std::vector<uint8_t> shards(count);
  table.find(section.keys, records.data(), shards.data());
  SectionRows rows;
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
  }
  return rows;
}

}  // namespace

std::string show(double value) {
  char text[32];  // 24 are the most that a double needs
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::string describe_difference(const kernels::OptimizerConfig& first,
                                const kernels::OptimizerConfig& second) {
  if (first.kind != second.kind) {
    return std::string("optimizer kind: ") + kernels::optimizer_kind_name(first.kind) +
           " against " + kernels::optimizer_kind_name(second.kind);
  }
  if (first.flags != second.flags) {
    const auto flag = [](const kernels::OptimizerConfig& config) {
      return std::string(config.nesterov() ? "True" : "False");
    };
    static_assert(kernels::kOptimizerKnownFlags == kernels::kOptimizerNesterov);
    return "nesterov: " + flag(first) + " against " + flag(second);
  }
  for (const HyperField& field : kHyperFields) {
    const double a = first.*field.member;
    const double b = second.*field.member;
    if (a != b) return std::string(field.name) + ": " + show(a) + " against " + show(b);
  }
  return "";
}

std::vector<std::vector<uint32_t>> locate_held(const wire::PushView& view,
                                               const table::ParamStore& store) {
  std::vector<std::vector<uint32_t>> held;
  for (const wire::PullTable& rows : view.holds.tables) {
    auto& records = held.emplace_back(rows.keys.size());
    store.tables[rows.table]->find(rows.keys, records.data(), nullptr);
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

std::optional<std::string> find_mismatch(const RoundPushes& pushes) {
  const auto& [first_rank, first] = *pushes.begin();
  for (const auto& [rank, push] : pushes) {
    const std::string found = describe_settings(first.view.header, push.view.header);
    if (found.empty()) continue;
    return found + " (trainer " + std::to_string(first_rank) + " against trainer " +
           std::to_string(rank) + "); all trainers must use the same settings in a round";
  }
  return std::nullopt;
}

bool RoundUpdate::is_void(const RoundPushes& pushes) {
  return std::all_of(pushes.begin(), pushes.end(),
                     [](const auto& entry) { return entry.second.view.header.weight == 0.0; });
}

void RoundUpdate::plan(const RoundPushes& pushes) {
  const wire::PushHeader& settings = pushes.begin()->second.view.header;
  clip_value_ = settings.clip_value;
  direct_ = pushes.size() == 1 && settings.clip_value == 0.0 && settings.clip_norm == 0.0;
  averaging_ = Averaging{};
  std::set<uint32_t> blocks;
  std::set<uint32_t> tables;
  double total = 0;
  for (const auto& [rank, push] : pushes) {
    const double weight = push.view.header.weight;
    averaging_.weights.push_back(weight);
    averaging_.equal = averaging_.equal && weight == averaging_.weights.front();
    total += weight;
    for (const wire::DenseSection& section : push.view.blocks) blocks.insert(section.block);
    for (const wire::TableSection& section : push.view.tables) tables.insert(section.table);
  }
  averaging_.factor = 1.0 / (averaging_.equal ? static_cast<double>(pushes.size()) : total);
  touched_blocks_.assign(blocks.begin(), blocks.end());
  touched_tables_.assign(tables.begin(), tables.end());
  shards_.resize(store_.tables.size() * table::Table::kShards);
  blocks_.resize(store_.blocks.size());
  tasks_.clear();
  for (const uint32_t block : touched_blocks_) tasks_.push_back({true, block, 0});
  for (const uint32_t table : touched_tables_) {
    for (uint32_t shard = 0; shard < table::Table::kShards; ++shard) {
      tasks_.push_back({false, table, shard});
    }
  }
}

void RoundUpdate::apply(const RoundPushes& pushes, uint64_t round, DelayCompensator* compensator) {
  plan(pushes);
  compensator_ = compensator;
  for (const uint32_t table : touched_tables_) store_.tables[table]->count_step();
  pool_.run(tasks_.size(), [&](size_t i) {
    merge_task(tasks_[i], pushes);
    update_task(tasks_[i], pushes, round);
  });
}

double RoundUpdate::merge(const RoundPushes& pushes) {
  plan(pushes);
  pool_.run(tasks_.size(), [&](size_t i) { merge_task(tasks_[i], pushes); });
  double total = 0;
  for (const Task& task : tasks_) {
    total += task.dense ? blocks_[task.id].squared_norm : shard_work(task).squared_norm;
  }
  return total;
}

void RoundUpdate::apply_merged(const RoundPushes& pushes, double total_norm, uint64_t round) {
  // As torch.nn.utils.clip_grad_norm_, in which a norm that is not a number spreads.
  const double ratio = pushes.begin()->second.view.header.clip_norm / (total_norm + 1e-6);
  const double scale = ratio > 1.0 ? 1.0 : ratio;
  for (const uint32_t table : touched_tables_) store_.tables[table]->count_step();
  pool_.run(tasks_.size(), [&](size_t i) {
    if (scale != 1.0) scale_task(tasks_[i], scale);
    update_task(tasks_[i], pushes, round);
  });
}

}  // namespace cpudist::server
