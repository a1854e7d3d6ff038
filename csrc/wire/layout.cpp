// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The layout of a parameter set: encoding, and the limits that both ends hold it to.

#include <cmath>
#include <cstring>

#include "wire/checks.h"
#include "wire/messages.h"

namespace cpudist::wire {
namespace {

constexpr size_t kConfigBytes = sizeof(kernels::OptimizerConfig);
constexpr size_t kTableBytesMin = 24;  // rows, dim, group, an empty name
constexpr size_t kBlockBytesMin = 48;  // elements, four u32, offset, row width, an empty name

std::string quoted(const std::string& name) { return "'" + name.substr(0, 200) + "'"; }

// Null if the table can be served.
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
  return {};
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
  }
  for (const BlockSpec& block : layout.blocks) {
    const std::string what = find_error(block, layout.configs.size());
    if (!what.empty()) throw Error(code, "block " + quoted(block.name) + ": " + what);
  }
}

WireDType read_dtype(Reader* reader) {
  const uint32_t dtype = reader->u32();
  if (dtype >= kWireDTypeCount) refuse("unknown wire dtype " + std::to_string(dtype));
  return static_cast<WireDType>(dtype);
}

TableSpec read_table(Reader* reader) {
  TableSpec table;
  table.rows = reader->u64();
  table.dim = reader->u32();
  table.group = reader->u32();
  table.name = reader->text(kNameBytesMax);
  return table;
}

BlockSpec read_block(Reader* reader) {
  BlockSpec block;
  block.elements = reader->u64();
  block.dtype = static_cast<DType>(reader->u32());
  block.shard = reader->u32();
  block.group = reader->u32();
  block.parameter = reader->u32();
  block.offset = reader->u64();
  block.row_width = reader->u64();
  block.name = reader->text(kNameBytesMax);
  return block;
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

uint32_t owner_of_bucket(uint32_t bucket, uint32_t server_count) {
  if (server_count == 0) throw Error(ErrorCode::kInvalidArgument, "no server to own a bucket");
  return bucket % server_count;
}

Buffer encode(const ParamSetLayout& message) {
  check_layout(message, ErrorCode::kInvalidArgument);
  Writer writer;
  writer.u32(static_cast<uint32_t>(message.configs.size()));
  writer.u32(static_cast<uint32_t>(message.tables.size()));
  writer.u32(static_cast<uint32_t>(message.blocks.size()));
  writer.u32(static_cast<uint32_t>(message.mode));
  writer.u64(message.max_staleness);
  writer.u64(message.exchanges_deltas ? 1 : 0);
  writer.u32(static_cast<uint32_t>(message.trainer_groups.size()));
  writer.u32(0);
  writer.bytes(message.trainer_groups.data(), message.trainer_groups.size() * sizeof(uint32_t));
  writer.u32(static_cast<uint32_t>(message.push_dtype));
  writer.u32(static_cast<uint32_t>(message.pull_dtype));
  writer.u32(static_cast<uint32_t>(message.compensation.kind));
  writer.u32(0);
  writer.f64(message.compensation.factor);
  writer.f64(message.compensation.momentum);
  writer.f64(message.compensation.epsilon);
  writer.bytes(message.configs.data(), message.configs.size() * kConfigBytes);
  for (const TableSpec& table : message.tables) {
    writer.u64(table.rows);
    writer.u32(table.dim);
    writer.u32(table.group);
    writer.text(table.name);
  }
  for (const BlockSpec& block : message.blocks) {
    writer.u64(block.elements);
    writer.u32(static_cast<uint32_t>(block.dtype));
    writer.u32(block.shard);
    writer.u32(block.group);
    writer.u32(block.parameter);
    writer.u64(block.offset);
    writer.u64(block.row_width);
    writer.text(block.name);
  }
  return writer.finish();
}

ParamSetLayout decode_layout(std::span<const uint8_t> payload) {
  Reader reader(payload);
  ParamSetLayout layout;
  const uint32_t config_count = reader.u32();
  const uint32_t table_count = reader.u32();
  const uint32_t block_count = reader.u32();
  layout.mode = static_cast<UpdateMode>(reader.u32());
  layout.max_staleness = reader.u64();
  const uint64_t exchanges = reader.u64();
  if (exchanges > 1) refuse("a layout with unknown flags");
  layout.exchanges_deltas = exchanges == 1;
  const uint32_t trainer_count = reader.u32();
  skip_zero(&reader);
  const auto groups = reader.array<uint32_t>(trainer_count);
  layout.trainer_groups.assign(groups.begin(), groups.end());
  layout.push_dtype = read_dtype(&reader);
  layout.pull_dtype = read_dtype(&reader);
  layout.compensation.kind = static_cast<Compensation>(reader.u32());
  skip_zero(&reader);
  layout.compensation.factor = reader.f64();
  layout.compensation.momentum = reader.f64();
  layout.compensation.epsilon = reader.f64();
  const auto configs = reader.array<kernels::OptimizerConfig>(config_count);
  layout.configs.assign(configs.begin(), configs.end());
  check_count(reader, table_count, kTableBytesMin, "tables");
  layout.tables.reserve(table_count);
  for (uint32_t i = 0; i < table_count; ++i) layout.tables.push_back(read_table(&reader));
  check_count(reader, block_count, kBlockBytesMin, "blocks");
  layout.blocks.reserve(block_count);
  for (uint32_t i = 0; i < block_count; ++i) layout.blocks.push_back(read_block(&reader));
  reader.expect_end();
  check_layout(layout, ErrorCode::kProtocol);
  return layout;
}

}  // namespace cpudist::wire
