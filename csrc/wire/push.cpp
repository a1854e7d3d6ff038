// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Payloads that carry gradients and dense weights: push and the dense reply. Headers of all
// sections come first, so that the length is checked before any value is looked at.
#include "wire/push.h"

#include <cmath>
#include <string>

#include "wire/bulk.h"
#include "wire/fields.h"
#include "wire/sections.h"

namespace cpudist::wire {
namespace {

constexpr uint64_t kPushFixedBytes = 7 * 8 + 4 * 4;
constexpr uint64_t kPartFixedBytes = 8 + 2 * 4;
constexpr uint64_t kChangesFixedBytes = 4 * 8 + 4 * 4;
constexpr uint32_t kBySamplesFlag = 1;
constexpr uint32_t kWantDenseFlag = 2;
constexpr uint32_t kHoldsFlag = 4;
constexpr uint32_t kClipEachFlag = 8;
constexpr uint64_t kHoldsFixedBytes = 2 * 8 + 2 * 4;

// What stands behind the head of its own of a push.
struct PushCounts {
  uint32_t configs = 0;
  uint32_t blocks = 0;
  uint32_t tables = 0;
  uint32_t flags = 0;
};

void check_finite(double value, const char* what) {
  if (!std::isfinite(value) || value < 0) {
    refuse(std::string(what) + " of a push: expected a finite number >= 0, found " +
           std::to_string(value));
  }
}

template <typename V>
void fields(V& v, Of<V, PushHeader>& m) {
  v.number(m.round);
  v.number(m.step);
  v.number(m.weight);
  v.number(m.samples);
  v.number(m.steps);
  v.number(m.clip_value);
  v.number(m.clip_norm);
}

template <typename V>
void fields(V& v, Of<V, PushCounts>& m) {
  v.number(m.configs);
  v.number(m.blocks);
  v.number(m.tables);
  v.number(m.flags);
}

template <typename V>
void fields(V& v, Of<V, Version>& m) {
  v.number(m.round);
  v.number(m.samples);
  v.number(m.steps);
}

uint64_t holds_bytes(const HoldRefs& holds) {
  const uint64_t size = kHoldsFixedBytes + section_bytes(holds.used.size(), sizeof(uint64_t));
  return checked_add(size, key_list_bytes(holds.tables));
}

std::vector<int64_t*> write_holds(const HoldRefs& holds, BulkWriter* writer) {
  writer->u64(holds.since);
  writer->u64(holds.kept_from);
  writer->u32(static_cast<uint32_t>(holds.tables.size()));
  writer->u32(static_cast<uint32_t>(holds.used.size()));
  write_key_headers(holds.tables, writer);
  writer->bytes(holds.used.data(), holds.used.size_bytes());
  return key_sections(holds.tables, writer);
}

PushHolds read_holds(Reader* reader, const ParamSetLayout& layout) {
  PushHolds holds;
  const HoldsHead head = read_holds_head(reader->rest(), layout);
  Reader inner(reader->array<uint8_t>(head.bytes.size()));
  holds.since = inner.u64();
  holds.kept_from = inner.u64();
  const uint32_t table_count = inner.u32();
  const uint32_t used_count = inner.u32();
  inner.array<uint8_t>(table_count * kSectionHeaderBytes);
  const auto used = inner.array<uint64_t>(used_count);
  holds.used.assign(used.begin(), used.end());
  holds.tables = read_key_lists(reader, head.tables, layout);
  return holds;
}

}  // namespace

SectionCounts read_counts(SectionKind kind, std::span<const uint8_t> payload) {
  Reader reader(payload);
  SectionCounts counts;
  const bool push = kind == SectionKind::kPush;
  reader.array<uint64_t>(push ? 7 : 4);
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
  head.tables = read_key_headers(&reader, table_count, layout);
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
  Put<BulkWriter> put(&writer);
  fields(put, header);
  PushCounts counts;
  counts.configs = static_cast<uint32_t>(header.configs.size());
  counts.blocks = static_cast<uint32_t>(blocks.size());
  counts.tables = static_cast<uint32_t>(tables.size());
  counts.flags = (header.by_samples ? kBySamplesFlag : 0) |
                 (header.want_dense ? kWantDenseFlag : 0) | (holds != nullptr ? kHoldsFlag : 0) |
                 (header.clip_each ? kClipEachFlag : 0);
  fields(put, counts);
  writer.bytes(header.configs.data(), header.configs.size_bytes());
  FilledPush filled = write_sections(blocks, tables, &writer);
  if (holds != nullptr) filled.held = write_holds(*holds, &writer);
  filled.payload = writer.finish();
  return filled;
}

PushView decode_push(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Reader reader(payload);
  PushView view;
  Take take(&reader);
  fields(take, view.header);
  check_finite(view.header.weight, "weight");
  check_finite(view.header.clip_value, "clip value");
  check_finite(view.header.clip_norm, "clip norm");
  PushCounts counts;
  fields(take, counts);
  const uint32_t flags = counts.flags;
  if (flags > (kBySamplesFlag | kWantDenseFlag | kHoldsFlag | kClipEachFlag)) {
    refuse("a push with unknown flags");
  }
  view.header.by_samples = (flags & kBySamplesFlag) != 0;
  view.header.want_dense = (flags & kWantDenseFlag) != 0;
  view.header.clip_each = (flags & kClipEachFlag) != 0;
  if (view.header.clip_each && view.header.clip_norm == 0) refuse("a push clips by no norm");
  check_equal(counts.configs, layout.configs.size(), "optimizer configurations of a push");
  view.header.configs = reader.array<kernels::OptimizerConfig>(counts.configs);
  for (const auto& config : view.header.configs) check_config(config);
  read_sections(&reader, counts.blocks, counts.tables, layout, &view.blocks, &view.tables, true);
  if ((flags & kHoldsFlag) != 0) view.holds = read_holds(&reader, layout);
  reader.expect_end();
  return view;
}

FilledPush layout_part(uint64_t round, std::span<const BlockRef> blocks, const Pool& pool) {
  check_order(blocks, &BlockRef::block, "block");
  BulkWriter writer(checked_add(kPartFixedBytes, block_bytes(blocks)), pool);
  writer.u64(round);
  writer.u32(static_cast<uint32_t>(blocks.size()));
  writer.u32(0);
  FilledPush filled = write_sections(blocks, {}, &writer);
  filled.payload = writer.finish();
  return filled;
}

PartView decode_part(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Reader reader(payload);
  PartView view;
  view.round = reader.u64();
  const uint32_t block_count = reader.u32();
  skip_zero(&reader);
  std::vector<TableSection> tables;
  read_sections(&reader, block_count, 0, layout, &view.blocks, &tables);
  reader.expect_end();
  return view;
}

void write_dense_head(Version version, uint64_t cut_wanted, size_t block_count, size_t table_count,
                      BulkWriter* writer) {
  Put<BulkWriter> put(writer);
  fields(put, version);
  writer->u64(cut_wanted);
  writer->u32(static_cast<uint32_t>(block_count));
  writer->u32(static_cast<uint32_t>(table_count));
}

FilledPush layout_dense(Version version, std::span<const BlockRef> blocks, const Pool& pool,
                        std::span<const TableRef> tables, uint64_t cut_wanted) {
  check_order(blocks, &BlockRef::block, "block");
  check_order(tables, &TableRef::table, "table");
  uint64_t size = checked_add(kDenseFixedBytes, block_bytes(blocks));
  size = checked_add(size, table_bytes(tables));
  BulkWriter writer(size, pool);
  write_dense_head(version, cut_wanted, blocks.size(), tables.size(), &writer);
  FilledPush filled = write_sections(blocks, tables, &writer);
  filled.payload = writer.finish();
  return filled;
}

DenseView decode_dense(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Reader reader(payload);
  DenseView view;
  Take take(&reader);
  fields(take, view.version);
  view.cut_wanted = reader.u64();
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
  Put<BulkWriter> put(&writer);
  fields(put, header.version);
  writer.u64(header.cut_wanted);
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
  Take take(&reader);
  fields(take, view.header.version);
  view.header.cut_wanted = reader.u64();
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
