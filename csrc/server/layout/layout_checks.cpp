// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Checks of a layout, and the words for two layouts that differ.

#include "server/layout/layout_checks.h"

#include <algorithm>
#include <charconv>

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

std::string differ(const std::string& item, const std::string& field, const std::string& first,
                   const std::string& second) {
  return item + ", " + field + ": " + first + " against " + second;
}

std::string compare(const std::string& item, const char* field, uint64_t first, uint64_t second) {
  if (first == second) return "";
  return differ(item, field, std::to_string(first), std::to_string(second));
}

std::string compare_numbers(const std::string& item, const char* field, double first,
                            double second) {
  if (first == second) return "";
  return differ(item, field, show(first), show(second));
}

std::string compare_compensation(const wire::DelayCompensation& first,
                                 const wire::DelayCompensation& second) {
  const std::string item = "delay compensation";
  std::string found =
      compare(item, "kind (0 none, 1 constant, 2 adaptive)", static_cast<uint64_t>(first.kind),
              static_cast<uint64_t>(second.kind));
  if (found.empty()) found = compare_numbers(item, "factor", first.factor, second.factor);
  if (found.empty()) found = compare_numbers(item, "momentum", first.momentum, second.momentum);
  if (found.empty()) found = compare_numbers(item, "epsilon", first.epsilon, second.epsilon);
  return found;
}

std::string compare_dtypes(const char* field, wire::WireDType first, wire::WireDType second) {
  if (first == second) return "";
  return differ("parameter set", field, name_of(first), name_of(second));
}

std::string compare_dtypes(const std::string& item, wire::DType first, wire::DType second) {
  if (first == second) return "";
  const auto name = [](wire::DType dtype) {
    return dtype == wire::DType::kFloat64 ? "float64" : "float32";
  };
  return differ(item, "dtype", name(first), name(second));
}

std::string compare_staleness(uint64_t first, uint64_t second) {
  if (first == second) return "";
  const auto bound = [](uint64_t steps) {
    return steps == wire::kAnyStaleness ? std::string("none") : std::to_string(steps);
  };
  return differ("parameter set", "max_staleness", bound(first), bound(second));
}

template <typename... Differences>
std::string first_of(const Differences&... differences) {
  std::string found;
  static_cast<void>(((found.empty() ? found = differences : found), ...));
  return found;
}

std::string text_of(const wire::InitialStep& step) {
  return std::string(initial_op_name(step.op)) + "(" + show(step.a) + ", " + show(step.b) + ")";
}

std::string text_of(const wire::RowOverride& rows) {
  return "rows " + std::to_string(rows.begin) + " to " + std::to_string(rows.end) + " are " +
         show(rows.value);
}

template <typename Items>
std::string compare_items(const std::string& item, const char* field, const Items& first,
                          const Items& second) {
  for (size_t i = 0; i < std::max(first.size(), second.size()); ++i) {
    const std::string one = i < first.size() ? text_of(first[i]) : "none";
    const std::string other = i < second.size() ? text_of(second[i]) : "none";
    if (one != other) return differ(item, field, one, other);
  }
  return "";
}

std::string compare_admission(const std::string& item, const wire::Admission& first,
                              const wire::Admission& second) {
  return first_of(
      compare(item, "admission (0 all, 1 by count, 2 by chance)", static_cast<uint64_t>(first.kind),
              static_cast<uint64_t>(second.kind)),
      compare(item, "pushes before admission", first.count, second.count),
      compare_numbers(item, "probability of admission", first.probability, second.probability),
      compare(item, "bytes of the sketch of admission", first.sketch_bytes, second.sketch_bytes));
}

std::string compare_eviction(const std::string& item, const wire::Eviction& first,
                             const wire::Eviction& second) {
  return first_of(
      compare(item, "eviction", first.on, second.on),
      compare(item, "eviction, unseen steps (0 for any)", first.unseen_steps, second.unseen_steps),
      compare(item, "eviction, unseen ms (0 for any)", first.unseen_ms, second.unseen_ms),
      compare(item, "eviction, min_count (0 for any)", first.min_count, second.min_count),
      compare(item, "eviction, max_rows (0 for none)", first.max_rows, second.max_rows),
      compare(item, "eviction, order (0 lru, 1 lfu)", static_cast<uint64_t>(first.order),
              static_cast<uint64_t>(second.order)));
}

std::string compare_table(size_t index, const wire::TableSpec& first,
                          const wire::TableSpec& second) {
  const std::string item = "table " + std::to_string(index) + " (" + first.name + ")";
  if (first.name != second.name) return differ(item, "name", first.name, second.name);
  return first_of(
      compare(item, "rows", first.rows, second.rows), compare(item, "dim", first.dim, second.dim),
      compare(item, "parameter group", first.group, second.group),
      compare(item, "remote", first.remote, second.remote),
      compare(item, "open", first.open, second.open),
      compare(item, "zeros for unknown keys", first.unknown_zeros, second.unknown_zeros),
      compare(item, "max_rows (0 for none)", first.max_rows, second.max_rows),
      compare_admission(item, first.admission, second.admission),
      compare_eviction(item, first.eviction, second.eviction),
      compare_items(item, "initial values", first.initial, second.initial),
      compare_items(item, "constant rows", first.overrides, second.overrides));
}

std::string compare_block(size_t index, const wire::BlockSpec& first,
                          const wire::BlockSpec& second) {
  const std::string item = "block " + std::to_string(index) + " (" + first.name + ")";
  if (first.name != second.name) return differ(item, "name", first.name, second.name);
  return first_of(compare(item, "elements", first.elements, second.elements),
                  compare_dtypes(item, first.dtype, second.dtype),
                  compare(item, "shard", first.shard, second.shard),
                  compare(item, "parameter group", first.group, second.group),
                  compare(item, "parameter", first.parameter, second.parameter),
                  compare(item, "offset", first.offset, second.offset),
                  compare(item, "row width", first.row_width, second.row_width));
}

std::string compare_group(size_t index, const kernels::OptimizerConfig& first,
                          const kernels::OptimizerConfig& second) {
  const std::string found = describe_difference(first, second);
  return found.empty() ? "" : "parameter group " + std::to_string(index) + ", " + found;
}

template <typename Items, typename Compare>
std::string compare_all(const Items& first, const Items& second, const Compare& compare_item) {
  for (size_t i = 0; i < std::min(first.size(), second.size()); ++i) {
    std::string found = compare_item(i, first[i], second[i]);
    if (!found.empty()) return found;
  }
  return "";
}

// Of gradients that were computed on the same values, the last one applied is this old.
void check_staleness(uint64_t max_staleness, uint64_t trainer_count) {
  if (max_staleness >= trainer_count - 1) return;
  throw Error(ErrorCode::kInvalidArgument,
              "max_staleness = " + std::to_string(max_staleness) + " is too small for " +
                  std::to_string(trainer_count) + " trainers: it must be at least " +
                  std::to_string(trainer_count - 1) +
                  ", as of as many gradients computed at once the last one applied is that old");
}

std::string compare_trainer_groups(const wire::ParamSetLayout& first,
                                   const wire::ParamSetLayout& second) {
  const auto& one = first.trainer_groups;
  const auto& other = second.trainer_groups;
  if (one.empty() != other.empty()) {
    return differ("parameter set", "groups of trainers", one.empty() ? "none (Sync)" : "given",
                  other.empty() ? "none (Sync)" : "given");
  }
  for (size_t rank = 0; rank < std::min(one.size(), other.size()); ++rank) {
    std::string found = compare("trainer " + std::to_string(rank), "group", one[rank], other[rank]);
    if (!found.empty()) return found;
  }
  return compare("parameter set", "trainers in groups", one.size(), other.size());
}

void check_trainer_groups(const wire::ParamSetLayout& layout, uint32_t trainer_count) {
  const size_t given = layout.trainer_groups.size();
  if (given == 0 || given == trainer_count) return;
  throw Error(ErrorCode::kInvalidArgument,
              "groups of " + std::to_string(given) + " trainers, but the run has " +
                  std::to_string(trainer_count) + ": each must be in exactly one group");
}

void check_memory_cap(const wire::ParamSetLayout& layout, const ServerOptions& options) {
  const uint64_t round_bytes = gradients_bytes(layout, options);
  if (options.memory_cap_bytes == 0 || round_bytes <= options.memory_cap_bytes) return;
  throw Error(
      ErrorCode::kOverloaded,
      "the dense gradients of one update need " + std::to_string(round_bytes) +
          " bytes on server " + std::to_string(options.shard_id) +
          ", pushes may hold memory_cap_bytes = " + std::to_string(options.memory_cap_bytes) +
          "; set CPUDIST_SERVER_MEMORY_CAP_BYTES to more than that, with room for the "
          "rows of tables, or to 0");
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

std::string describe_difference(const wire::ParamSetLayout& first,
                                const wire::ParamSetLayout& second) {
  const std::string set = "parameter set";
  const std::string found =
      first_of(compare(set, "update mode (0 in rounds, 1 on arrival)",
                       static_cast<uint64_t>(first.mode), static_cast<uint64_t>(second.mode)),
               compare_staleness(first.max_staleness, second.max_staleness),
               compare(set, "exchanges_deltas", first.exchanges_deltas, second.exchanges_deltas),
               compare_dtypes("wire_dtype", first.push_dtype, second.push_dtype),
               compare_dtypes("pull_dtype", first.pull_dtype, second.pull_dtype),
               compare_numbers(set, "decay of the average (0 for none)", first.average_decay,
                               second.average_decay),
               compare_trainer_groups(first, second),
               compare_compensation(first.compensation, second.compensation),
               compare_all(first.tables, second.tables, compare_table),
               compare_all(first.blocks, second.blocks, compare_block),
               compare_all(first.configs, second.configs, compare_group),
               compare(set, "number of tables", first.tables.size(), second.tables.size()),
               compare(set, "number of blocks", first.blocks.size(), second.blocks.size()),
               compare(set, "number of groups", first.configs.size(), second.configs.size()));
  return found.empty() ? "an unnamed field" : found;
}

uint64_t gradients_bytes(const wire::ParamSetLayout& layout, const ServerOptions& options) {
  constexpr uint64_t kMost = uint64_t{1} << 62;  // one block of a layout is below 2^59 bytes
  const uint64_t pushes = layout.mode == wire::UpdateMode::kRounds ? options.trainer_count : 1;
  uint64_t round_bytes = 0;
  for (const wire::BlockSpec& block : layout.blocks) {
    if (block.shard != options.shard_id) continue;
    const uint64_t block_bytes = block.elements * size_of(block.dtype) * pushes;
    round_bytes = std::min(kMost, round_bytes + block_bytes);
  }
  return round_bytes;
}

void check_layout(const wire::ParamSetLayout& layout, const ServerOptions& options) {
  for (const wire::BlockSpec& block : layout.blocks) {
    if (block.shard < options.server_count) continue;
    throw Error(ErrorCode::kInvalidArgument, "block " + block.name + ": no server " +
                                                 std::to_string(block.shard) + " among " +
                                                 std::to_string(options.server_count));
  }
  check_trainer_groups(layout, options.trainer_count);
  check_staleness(layout.max_staleness, options.trainer_count);
  check_memory_cap(layout, options);
}

void check_configs(const wire::ParamSetLayout& layout, const wire::PushHeader& header) {
  for (size_t group = 0; group < header.configs.size(); ++group) {
    const kernels::OptimizerConfig& opened = layout.configs[group];
    const kernels::OptimizerConfig& now = header.configs[group];
    const std::string where = "push: parameter group " + std::to_string(group) + ", ";
    if (now.kind != opened.kind ||
        kernels::state_elements(now, 4, 4) != kernels::state_elements(opened, 4, 4)) {
      throw Error(ErrorCode::kConfigMismatch,
                  where + describe_difference(opened, now) +
                      " (opened against pushed): the optimizer's state cannot change its shape");
    }
  }
}

}  // namespace cpudist::server
