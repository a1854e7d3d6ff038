// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The layout of a parameter set: encoding, and the limits that both ends hold it to.
#include "wire/layout.h"

#include <algorithm>
#include <cmath>

#include "kernels/hash.h"
#include "wire/fields.h"

namespace cpudist::wire {
namespace {

// rows, four u32, seed, two u32, max_rows, 24 of admission, 32 of eviction, two counts, empty name
constexpr size_t kTableBytesMin = 120;
constexpr uint32_t kAdmissionCountMax = 15;          // of counters of 4 bits
constexpr uint64_t kSketchBytesUnit = 64;            // a cache line
constexpr uint64_t kStepsLimit = uint64_t{1} << 31;  // rows say the low half of an update's number
constexpr size_t kStepBytes = 24;
constexpr size_t kOverrideBytes = 24;
constexpr size_t kBlockBytesMin = 48;  // elements, four u32, offset, row width, an empty name

std::string quoted(const std::string& name) { return "'" + name.substr(0, 200) + "'"; }

std::string find_initial_error(const TableSpec& table) {
  const bool has_values = table.seed != 0 || !table.initial.empty() || !table.overrides.empty();
  if (!table.remote && has_values) return "initial values, though it is not remote";
  if (const char* what = kernels::find_initial_error(table.initial, table.overrides)) return what;
  for (const RowOverride& rows : table.overrides) {
    if (table.open || (rows.begin < rows.end && rows.end <= table.rows)) continue;
    return "constant rows up to " + std::to_string(rows.end) + " of " + std::to_string(table.rows);
  }
  return {};
}

std::string find_admission_error(const Admission& admission) {
  const auto& [kind, count, probability, sketch_bytes] = admission;
  if (kind > AdmissionKind::kProbability) {
    return "unknown admission " + std::to_string(static_cast<uint32_t>(kind));
  }
  if (kind == AdmissionKind::kCount) {
    if (count < 1 || count > kAdmissionCountMax) {
      return "admission of keys pushed " + std::to_string(count) + " times, expected 1 to 15";
    }
    if (sketch_bytes < kSketchBytesUnit || sketch_bytes % kSketchBytesUnit != 0 ||
        sketch_bytes >= kElementsLimit) {
      return "a sketch of " + std::to_string(sketch_bytes) +
             " bytes, expected a multiple of 64 below 2^40";
    }
  } else if (count != 0 || sketch_bytes != 0) {
    return "counts of an admission that does not count";
  }
  if (kind == AdmissionKind::kProbability) {
    if (!(probability > 0 && probability <= 1)) {
      return "admission with a probability that is not above 0 and at most 1";
    }
  } else if (probability != 1) {
    return "a probability of an admission that draws nothing";
  }
  return {};
}

std::string find_eviction_error(const Eviction& eviction) {
  const auto& [on, unseen_steps, unseen_ms, min_count, max_rows, order] = eviction;
  const bool given = unseen_steps != 0 || unseen_ms != 0 || min_count != 0 || max_rows != 0;
  if (order > EvictionOrder::kLfu) {
    return "unknown order of eviction " + std::to_string(static_cast<uint32_t>(order));
  }
  if (on != given) return on ? "eviction without a condition" : "conditions of no eviction";
  if (unseen_steps >= kStepsLimit) {
    return "eviction after " + std::to_string(unseen_steps) + " steps, expected fewer than 2^31";
  }
  if (max_rows >= kRowsLimit) {
    return "eviction above " + std::to_string(max_rows) + " rows, expected fewer than 2^62";
  }
  if (max_rows == 0 && order != EvictionOrder::kLru) return "an order of eviction of no bound";
  return {};
}

// Of what tables have that nobody but the servers hold.
std::string find_remote_error(const TableSpec& table) {
  if (!table.remote) {
    if (table.open) return "open, though it is not remote";
    if (table.unknown_zeros) return "zeros for unknown keys, though it is not remote";
    if (table.max_rows != 0) return "a bound of its rows, though it is not remote";
    if (table.admission != Admission{}) return "admission, though it is not remote";
    if (table.eviction != Eviction{}) return "eviction, though it is not remote";
    return {};
  }
  if (table.max_rows >= kRowsLimit) {
    return "a bound of " + std::to_string(table.max_rows) + " rows, expected fewer than 2^62";
  }
  if (table.max_rows != 0 && table.eviction.max_rows != 0) {
    return "a bound of its rows that refuses, and one that evicts";
  }
  const std::string what = find_admission_error(table.admission);
  return what.empty() ? find_eviction_error(table.eviction) : what;
}

// Empty if the table can be served.
std::string find_error(const TableSpec& table, size_t groups) {
  if (table.name.size() > kNameBytesMax) return "a name above 4096 bytes";
  if (table.dim < 1 || table.dim > kDimMax) {
    return "dim " + std::to_string(table.dim) + ", expected 1 to 65536";
  }
  if (table.rows >= kRowsLimit) {
    return std::to_string(table.rows) + " rows, expected fewer than 2^62";
  }
  if (table.group >= groups) {
    return "group " + std::to_string(table.group) + " of " + std::to_string(groups);
  }
  const std::string what = find_remote_error(table);
  return what.empty() ? find_initial_error(table) : what;
}

std::string find_error(const BlockSpec& block, size_t groups) {
  if (block.name.size() > kNameBytesMax) return "a name above 4096 bytes";
  if (block.dtype != DType::kFloat32 && block.dtype != DType::kFloat64) {
    return "unknown dtype " + std::to_string(static_cast<uint32_t>(block.dtype));
  }
  if (block.elements >= kElementsLimit || block.offset >= kElementsLimit) {
    return std::to_string(block.elements) + " elements from " + std::to_string(block.offset) +
           ", expected fewer than 2^40";
  }
  if (block.row_width < 1 || block.elements % block.row_width != 0) {
    return "rows of " + std::to_string(block.row_width) + " elements do not divide " +
           std::to_string(block.elements) + " elements";
  }
  if (block.group >= groups) {
    return "group " + std::to_string(block.group) + " of " + std::to_string(groups);
  }
  return {};
}

void check_groups(const ParamSetLayout& layout, ErrorCode code) {
  const auto& groups = layout.trainer_groups;
  if (groups.empty()) return;
  if (layout.mode != UpdateMode::kRounds) throw Error(code, "updates on arrival have no groups");
  if (groups.size() > kTrainersMax) {
    throw Error(code, "groups of " + std::to_string(groups.size()) +
                          " trainers, expected at most " + std::to_string(kTrainersMax));
  }
  // In this form no group is empty, and equal groups have equal bytes.
  uint32_t next = 0;
  for (size_t rank = 0; rank < groups.size(); ++rank) {
    if (groups[rank] > next) {
      throw Error(code, "trainer " + std::to_string(rank) + " is in group " +
                            std::to_string(groups[rank]) + ", expected at most " +
                            std::to_string(next) + ": groups are numbered by their lowest ranks");
    }
    if (groups[rank] == next) ++next;
  }
}

// Null if gradients can be compensated like this.
const char* find_error(const DelayCompensation& compensation) {
  const auto& [kind, factor, momentum, epsilon] = compensation;
  const bool adaptive = kind == Compensation::kAdaptive;
  if (kind > Compensation::kAdaptive) return "an unknown kind";
  if (!std::isfinite(factor) || factor < 0) return "a factor that is not finite and >= 0";
  if (kind == Compensation::kNone && factor != 0) return "a factor of none";
  if (adaptive && !(momentum >= 0 && momentum < 1)) return "a momentum that is not in [0, 1)";
  if (adaptive && !(std::isfinite(epsilon) && epsilon > 0)) return "an epsilon that is not > 0";
  if (!adaptive && (momentum != 0 || epsilon != 0)) return "a running mean of none";
  return nullptr;
}

void check_layout(const ParamSetLayout& layout, ErrorCode code) {
  if (layout.mode != UpdateMode::kRounds && layout.mode != UpdateMode::kOnArrival) {
    throw Error(code, "unknown update mode " + std::to_string(static_cast<uint32_t>(layout.mode)));
  }
  if (layout.mode == UpdateMode::kRounds && layout.max_staleness != kAnyStaleness) {
    throw Error(code, "rounds have no staleness to bound");
  }
  if (layout.exchanges_deltas &&
      (layout.max_staleness != kAnyStaleness || !layout.trainer_groups.empty() ||
       layout.compensation.kind != Compensation::kNone)) {
    throw Error(code, "deltas are no gradients, to be late or averaged in groups");
  }
  if (layout.pull_dtype == WireDType::kInt8) {
    throw Error(code, "weights do not travel as int8: nothing makes up for what it loses");
  }
  if (!(layout.average_decay >= 0 && layout.average_decay < 1)) {
    throw Error(code, "an average whose decay is not in [0, 1)");
  }
  if (layout.exchanges_deltas && layout.average_decay != 0) {
    throw Error(code, "an average of values that trainers step");
  }
  check_groups(layout, code);
  if (const char* what = find_error(layout.compensation)) {
    throw Error(code, std::string("delay compensation with ") + what);
  }
  if (layout.mode == UpdateMode::kRounds && layout.compensation.kind != Compensation::kNone) {
    throw Error(code, "rounds have no delay to compensate");
  }
  for (const auto& config : layout.configs) {
    if (const char* what = kernels::find_config_error(config)) throw Error(code, what);
  }
  for (const TableSpec& table : layout.tables) {
    const std::string what = find_error(table, layout.configs.size());
    if (!what.empty()) throw Error(code, "table " + quoted(table.name) + ": " + what);
    // A trainer steps rows itself that servers might not have, or have no more.
    const bool comes_and_goes = table.unknown_zeros || table.max_rows != 0 ||
                                table.admission != Admission{} || table.eviction != Eviction{};
    if (!layout.exchanges_deltas || !comes_and_goes) continue;
    throw Error(code, "table " + quoted(table.name) +
                          " refuses or evicts rows, or reads zeros for those that are not there: "
                          "deltas of a row are for what its trainer has read");
  }
  for (const BlockSpec& block : layout.blocks) {
    const std::string what = find_error(block, layout.configs.size());
    if (!what.empty()) throw Error(code, "block " + quoted(block.name) + ": " + what);
  }
}

}  // namespace

void check_config(const kernels::OptimizerConfig& config) {
  if (const char* what = kernels::find_config_error(config)) refuse(what);
}

size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
  }
  throw Error(ErrorCode::kInternal,
              "unknown dtype " + std::to_string(static_cast<uint32_t>(dtype)));
}

uint32_t parameter_count(const ParamSetLayout& layout) {
  uint32_t count = 0;
  for (const BlockSpec& block : layout.blocks) {
    if (block.parameter >= layout.blocks.size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "block '" + block.name + "': parameter " + std::to_string(block.parameter) +
                      " is not below the number of blocks; parameters are numbered from 0");
    }
    count = std::max(count, block.parameter + 1);
  }
  return count;
}

uint32_t owner_of_bucket(uint32_t bucket, uint32_t server_count) {
  if (server_count == 0) throw Error(ErrorCode::kInvalidArgument, "no server to own a bucket");
  return static_cast<uint32_t>(uint64_t{bucket} * server_count / kernels::kBucketCount);
}

kernels::InitialRows initial_rows(const TableSpec& table) {
  return {table.initial, table.overrides, kernels::table_salt(table.name), table.seed};
}

template <typename V>
void fields(V& v, Of<V, InitialStep>& m) {
  v.number(m.op);
  v.zero();
  v.number(m.a);
  v.number(m.b);
}

template <typename V>
void fields(V& v, Of<V, RowOverride>& m) {
  v.number(m.begin);
  v.number(m.end);
  v.number(m.value);
}

template <typename V>
void fields(V& v, Of<V, Admission>& m) {
  v.number(m.kind);
  v.number(m.count);
  v.number(m.probability);
  v.number(m.sketch_bytes);
}

template <typename V>
void fields(V& v, Of<V, Eviction>& m) {
  v.number(m.unseen_steps);
  v.number(m.unseen_ms);
  v.number(m.min_count);
  v.number(m.order);
  v.number(m.max_rows);
}

template <typename V>
void fields(V& v, Of<V, TableSpec>& m) {
  v.number(m.rows);
  v.number(m.dim);
  v.number(m.group);
  v.flag32(m.remote, "remote");
  v.flag32(m.open, "open");
  v.number(m.seed);
  v.flag32(m.unknown_zeros, "unknown_zeros");
  v.flag32(m.eviction.on, "eviction");
  v.number(m.max_rows);
  fields(v, m.admission);
  fields(v, m.eviction);
  const uint32_t steps = v.count32(m.initial);
  const uint32_t overrides = v.count32(m.overrides);
  v.items(m.initial, steps, kStepBytes, "steps of an initial program");
  v.items(m.overrides, overrides, kOverrideBytes, "runs of constant rows");
  v.text(m.name, kNameBytesMax);
}

template <typename V>
void fields(V& v, Of<V, BlockSpec>& m) {
  v.number(m.elements);
  v.number(m.dtype);
  v.number(m.shard);
  v.number(m.group);
  v.number(m.parameter);
  v.number(m.offset);
  v.number(m.row_width);
  v.text(m.name, kNameBytesMax);
}

template <typename V>
void fields(V& v, Of<V, DelayCompensation>& m) {
  v.number(m.kind);
  v.zero();
  v.number(m.factor);
  v.number(m.momentum);
  v.number(m.epsilon);
}

// What check_layout() looks at is taken as it comes.
template <typename V>
void fields(V& v, Of<V, ParamSetLayout>& m) {
  const uint32_t configs = v.count32(m.configs);
  const uint32_t tables = v.count32(m.tables);
  const uint32_t blocks = v.count32(m.blocks);
  v.number(m.mode);
  v.number(m.max_staleness);
  v.flag64(m.exchanges_deltas, "layout");
  const uint32_t trainers = v.count32(m.trainer_groups);
  v.zero();
  v.elements(m.trainer_groups, trainers);
  v.choice(m.push_dtype, WireDType::kFloat32, WireDType::kInt8, "wire dtype");
  v.choice(m.pull_dtype, WireDType::kFloat32, WireDType::kInt8, "wire dtype");
  fields(v, m.compensation);
  v.number(m.average_decay);
  v.elements(m.configs, configs);
  v.items(m.tables, tables, kTableBytesMin, "tables");
  v.items(m.blocks, blocks, kBlockBytesMin, "blocks");
}

Buffer encode(const ParamSetLayout& message) {
  check_layout(message, ErrorCode::kInvalidArgument);
  return write_message(message);
}

ParamSetLayout decode_layout(std::span<const uint8_t> payload) {
  ParamSetLayout layout = read_message<ParamSetLayout>(payload);
  check_layout(layout, ErrorCode::kProtocol);
  return layout;
}

}  // namespace cpudist::wire
