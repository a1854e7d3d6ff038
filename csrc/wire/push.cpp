// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Payloads that carry gradients and dense weights: push and the dense reply. Headers of all
// sections come first, so that the length is checked before any value is looked at.

#include <cmath>

#include "wire/bulk.h"
#include "wire/messages.h"
#include "wire/sections.h"

namespace cpudist::wire {
namespace {

constexpr uint64_t kPushFixedBytes = 7 * 8 + 4 * 4;
constexpr uint64_t kDenseFixedBytes = 3 * 8 + 2 * 4;
constexpr uint64_t kChangesFixedBytes = 3 * 8 + 4 * 4;
constexpr uint32_t kBySamplesFlag = 1;
constexpr uint32_t kWantDenseFlag = 2;
constexpr uint32_t kHoldsFlag = 4;
constexpr uint64_t kHoldsFixedBytes = 2 * 8 + 2 * 4;
constexpr uint64_t kHoldsHeaderBytes = 16;

double finite(double value, const char* what) {
  if (!std::isfinite(value) || value < 0) {
    refuse(std::string(what) + " of a push: expected a finite number >= 0, found " +
           std::to_string(value));
  }
  return value;
}

uint64_t holds_bytes(const HoldRefs& holds) {
  uint64_t size = kHoldsFixedBytes + section_bytes(holds.used.size(), sizeof(uint64_t));
  for (const TableRef& ref : holds.tables) {
    size = checked_add(size, kHoldsHeaderBytes);
    size = checked_add(size, section_bytes(ref.row_count, sizeof(int64_t)));
  }
  return size;
}

std::vector<int64_t*> write_holds(const HoldRefs& holds, BulkWriter* writer) {
  writer->u64(holds.since);
  writer->u64(holds.kept_from);
  writer->u32(static_cast<uint32_t>(holds.tables.size()));
  writer->u32(static_cast<uint32_t>(holds.used.size()));
  for (const TableRef& ref : holds.tables) {
    writer->u32(ref.table);
    writer->u32(0);
    writer->u64(ref.row_count);
  }
  writer->bytes(holds.used.data(), holds.used.size_bytes());
  std::vector<int64_t*> keys;
  keys.reserve(holds.tables.size());
  for (const TableRef& ref : holds.tables) keys.push_back(writer->section<int64_t>(ref.row_count));
  return keys;
}

PushHolds read_holds(Reader* reader, const ParamSetLayout& layout) {
  PushHolds holds;
  const HoldsHead head = read_holds_head(reader->rest(), layout);
  Reader fields(reader->array<uint8_t>(head.bytes.size()));
  holds.since = fields.u64();
  holds.kept_from = fields.u64();
  const uint32_t table_count = fields.u32();
  const uint32_t used_count = fields.u32();
  fields.array<uint8_t>(table_count * kHoldsHeaderBytes);
  const auto used = fields.array<uint64_t>(used_count);
  holds.used.assign(used.begin(), used.end());
  for (const TableHeader& header : head.tables) {
    PullTable& held = holds.tables.emplace_back();
    held.table = header.table;
    held.keys = reader->array<int64_t>(header.row_count);
    check_keys(held.keys, layout.tables[held.table]);
  }
  return holds;
}

}  // namespace

SectionCounts read_counts(SectionKind kind, std::span<const uint8_t> payload) {
  Reader reader(payload);
  SectionCounts counts;
  const bool push = kind == SectionKind::kPush;
  reader.array<uint64_t>(push ? 7 : 3);
  counts.head_bytes = kDenseFixedBytes;
  if (push) {
    const uint64_t configs = reader.u32();
    counts.head_bytes = kPushFixedBytes + padded(configs * sizeof(kernels::OptimizerConfig));
  } else if (kind == SectionKind::kChanges) {
    reader.u32();
    counts.head_bytes = kChangesFixedBytes;
  }
  counts.blocks = reader.u32();
  counts.tables = reader.u32();
  counts.holds = push && (reader.u32() & kHoldsFlag) != 0;
  return counts;
}

HoldsHead read_holds_head(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Reader reader(payload);
  HoldsHead head;
  reader.array<uint64_t>(2);
  const uint32_t table_count = reader.u32();
  const uint32_t used_count = reader.u32();
  check_count(reader, table_count, kHoldsHeaderBytes, "tables");
  uint64_t next_id = 0;
  for (uint32_t i = 0; i < table_count; ++i) {
    const uint32_t table = reader.u32();
    skip_zero(&reader);
    check_id(table, layout.tables.size(), &next_id, "table");
    head.tables.push_back({table, reader.u64()});
  }
  reader.array<uint64_t>(used_count);
  head.bytes = payload.first(payload.size() - reader.remaining());
  return head;
}

FilledPush layout_push(const PushHeader& header, std::span<const BlockRef> blocks,
                       std::span<const TableRef> tables, const Pool& pool, const HoldRefs* holds) {
  check_order(blocks, &BlockRef::block, "block");
  check_order(tables, &TableRef::table, "table");
  uint64_t size = checked_add(kPushFixedBytes, padded(header.configs.size_bytes()));
  size = checked_add(size, block_bytes(blocks));
  size = checked_add(size, table_bytes(tables));
  if (holds != nullptr) {
    check_order(std::span<const TableRef>(holds->tables), &TableRef::table, "table");
    size = checked_add(size, holds_bytes(*holds));
  }
  BulkWriter writer(size, pool);
  writer.u64(header.round);
  writer.u64(header.step);
  writer.f64(header.weight);
  writer.u64(header.samples);
  writer.u64(header.steps);
  writer.f64(header.clip_value);
  writer.f64(header.clip_norm);
  writer.u32(static_cast<uint32_t>(header.configs.size()));
  writer.u32(static_cast<uint32_t>(blocks.size()));
  writer.u32(static_cast<uint32_t>(tables.size()));
  writer.u32((header.by_samples ? kBySamplesFlag : 0) | (header.want_dense ? kWantDenseFlag : 0) |
             (holds != nullptr ? kHoldsFlag : 0));
  writer.bytes(header.configs.data(), header.configs.size_bytes());
  FilledPush filled = write_sections(blocks, tables, &writer);
  if (holds != nullptr) filled.held = write_holds(*holds, &writer);
  filled.payload = writer.finish();
  return filled;
}

PushView decode_push(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Reader reader(payload);
  PushView view;
  view.header.round = reader.u64();
  view.header.step = reader.u64();
  view.header.weight = finite(reader.f64(), "weight");
  view.header.samples = reader.u64();
  view.header.steps = reader.u64();
  view.header.clip_value = finite(reader.f64(), "clip value");
  view.header.clip_norm = finite(reader.f64(), "clip norm");
  const uint32_t config_count = reader.u32();
  const uint32_t block_count = reader.u32();
  const uint32_t table_count = reader.u32();
  const uint32_t flags = reader.u32();
  if (flags > (kBySamplesFlag | kWantDenseFlag | kHoldsFlag)) refuse("a push with unknown flags");
  view.header.by_samples = (flags & kBySamplesFlag) != 0;
  view.header.want_dense = (flags & kWantDenseFlag) != 0;
  check_equal(config_count, layout.configs.size(), "optimizer configurations of a push");
  view.header.configs = reader.array<kernels::OptimizerConfig>(config_count);
  for (const auto& config : view.header.configs) check_config(config);
  read_sections(&reader, block_count, table_count, layout, &view.blocks, &view.tables);
  if ((flags & kHoldsFlag) != 0) view.holds = read_holds(&reader, layout);
  reader.expect_end();
  return view;
}

FilledPush layout_dense(Version version, std::span<const BlockRef> blocks, const Pool& pool,
                        std::span<const TableRef> tables) {
  check_order(blocks, &BlockRef::block, "block");
  check_order(tables, &TableRef::table, "table");
  uint64_t size = checked_add(kDenseFixedBytes, block_bytes(blocks));
  size = checked_add(size, table_bytes(tables));
  BulkWriter writer(size, pool);
  writer.u64(version.round);
  writer.u64(version.samples);
  writer.u64(version.steps);
  writer.u32(static_cast<uint32_t>(blocks.size()));
  writer.u32(static_cast<uint32_t>(tables.size()));
  FilledPush filled = write_sections(blocks, tables, &writer);
  filled.payload = writer.finish();
  return filled;
}

DenseView decode_dense(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Reader reader(payload);
  DenseView view;
  view.version.round = reader.u64();
  view.version.samples = reader.u64();
  view.version.steps = reader.u64();
  const uint32_t block_count = reader.u32();
  const uint32_t table_count = reader.u32();
  read_sections(&reader, block_count, table_count, layout, &view.blocks, &view.tables);
  reader.expect_end();
  return view;
}

FilledPush layout_changes(const ChangesHeader& header, std::span<const BlockRef> blocks,
                          std::span<const TableRef> tables, const Pool& pool) {
  check_order(blocks, &BlockRef::block, "block");
  check_order(tables, &TableRef::table, "table");
  uint64_t size = checked_add(kChangesFixedBytes, block_bytes(blocks));
  size = checked_add(size, table_bytes(tables));
  BulkWriter writer(size, pool);
  writer.u64(header.version.round);
  writer.u64(header.version.samples);
  writer.u64(header.version.steps);
  writer.u32(header.members);
  writer.u32(static_cast<uint32_t>(blocks.size()));
  writer.u32(static_cast<uint32_t>(tables.size()));
  writer.u32(header.more ? 1 : 0);
  FilledPush filled = write_sections(blocks, tables, &writer);
  filled.payload = writer.finish();
  return filled;
}

ChangesView decode_changes(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Reader reader(payload);
  ChangesView view;
  view.header.version.round = reader.u64();
  view.header.version.samples = reader.u64();
  view.header.version.steps = reader.u64();
  view.header.members = reader.u32();
  const uint32_t block_count = reader.u32();
  const uint32_t table_count = reader.u32();
  const uint32_t flags = reader.u32();
  if (flags > 1) refuse("changes with unknown flags");
  view.header.more = flags == 1;
  read_sections(&reader, block_count, table_count, layout, &view.blocks, &view.tables);
  reader.expect_end();
  return view;
}

}  // namespace cpudist::wire
