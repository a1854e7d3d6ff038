// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Payloads that carry gradients and dense weights: push and the dense reply. Headers of all
// sections come first, so that the length is checked before any value is looked at.

#include <cmath>

#include "core/messages.h"
#include "core/messages_bulk.h"

namespace cpudist::core {
namespace {

constexpr uint64_t kPushFixedBytes = 6 * 8 + 4 * 4;
constexpr uint64_t kDenseFixedBytes = 2 * 8 + 2 * 4;
constexpr uint32_t kBySamplesFlag = 1;
constexpr uint32_t kWantDenseFlag = 2;
constexpr uint64_t kSectionHeaderBytes = 16;

uint64_t dense_bytes(std::span<const BlockRef> blocks) {
  uint64_t size = 0;
  for (const BlockRef& ref : blocks) {
    size = wire::checked_add(size, kSectionHeaderBytes);
    size = wire::checked_add(size, wire::padded(ref.size_bytes));
  }
  return size;
}

uint64_t table_bytes(std::span<const TableRef> tables) {
  uint64_t size = 0;
  for (const TableRef& ref : tables) {
    size = wire::checked_add(size, kSectionHeaderBytes);
    size = wire::checked_add(size, wire::section_bytes(ref.row_count, sizeof(int64_t)));
    const uint64_t elements = wire::checked_multiply(ref.row_count, ref.dim);
    size = wire::checked_add(size, wire::section_bytes(elements, sizeof(float)));
  }
  return size;
}

void write_block_headers(std::span<const BlockRef> blocks, wire::BulkWriter* writer) {
  for (const BlockRef& ref : blocks) {
    writer->u32(ref.block);
    writer->u32(0);
    writer->u64(ref.size_bytes);
  }
}

void write_block_sections(std::span<const BlockRef> blocks, wire::BulkWriter* writer,
                          FilledPush* filled) {
  filled->blocks.reserve(blocks.size());
  for (const BlockRef& ref : blocks) {
    filled->blocks.push_back(writer->section<uint8_t>(ref.size_bytes));
  }
}

double finite(double value, const char* what) {
  if (!std::isfinite(value) || value < 0) {
    wire::refuse(std::string(what) + " of a push: expected a finite number >= 0, found " +
                 std::to_string(value));
  }
  return value;
}

struct BlockHeader {
  uint32_t block;
  uint64_t size_bytes;
};

struct TableHeader {
  uint32_t table;
  uint64_t row_count;
};

std::vector<BlockHeader> read_block_headers(Reader* reader, uint32_t count,
                                            const ParamSetLayout& layout) {
  wire::check_count(*reader, count, kSectionHeaderBytes, "blocks");
  std::vector<BlockHeader> headers;
  headers.reserve(count);
  uint64_t next_id = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t block = reader->u32();
    wire::skip_zero(reader);
    const uint64_t size_bytes = reader->u64();
    wire::check_id(block, layout.blocks.size(), &next_id, "block");
    const BlockSpec& spec = layout.blocks[block];
    wire::check_equal(size_bytes, spec.elements * size_of(spec.dtype), "bytes of a block");
    headers.push_back({block, size_bytes});
  }
  return headers;
}

std::vector<TableHeader> read_table_headers(Reader* reader, uint32_t count,
                                            const ParamSetLayout& layout) {
  wire::check_count(*reader, count, kSectionHeaderBytes, "tables");
  std::vector<TableHeader> headers;
  headers.reserve(count);
  uint64_t next_id = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t table = reader->u32();
    const uint32_t dim = reader->u32();
    const uint64_t row_count = reader->u64();
    wire::check_id(table, layout.tables.size(), &next_id, "table");
    wire::check_equal(dim, layout.tables[table].dim, "dim of a table");
    headers.push_back({table, row_count});
  }
  return headers;
}

std::vector<DenseSection> read_block_sections(Reader* reader,
                                              std::span<const BlockHeader> headers) {
  std::vector<DenseSection> sections;
  sections.reserve(headers.size());
  for (const BlockHeader& header : headers) {
    sections.push_back({header.block, reader->array<uint8_t>(header.size_bytes)});
  }
  return sections;
}

}  // namespace

namespace wire {

void check_keys(std::span<const int64_t> keys, const TableSpec& table) {
  // Accumulated without a branch: one pass at memory speed. A negative key is a huge unsigned one.
  bool outside = false;
  for (const int64_t key : keys) outside |= static_cast<uint64_t>(key) >= table.rows;
  if (outside) {
    refuse("a key of table '" + table.name.substr(0, 200) + "' is outside its " +
           std::to_string(table.rows) + " rows");
  }
}

}  // namespace wire

FilledPush layout_push(const PushHeader& header, std::span<const BlockRef> blocks,
                       std::span<const TableRef> tables, const Pool& pool) {
  wire::check_order(blocks, &BlockRef::block, "block");
  wire::check_order(tables, &TableRef::table, "table");
  uint64_t size = wire::checked_add(kPushFixedBytes, wire::padded(header.configs.size_bytes()));
  size = wire::checked_add(size, dense_bytes(blocks));
  size = wire::checked_add(size, table_bytes(tables));
  wire::BulkWriter writer(size, pool);
  writer.u64(header.round);
  writer.u64(header.step);
  writer.f64(header.weight);
  writer.u64(header.samples);
  writer.f64(header.clip_value);
  writer.f64(header.clip_norm);
  writer.u32(static_cast<uint32_t>(header.configs.size()));
  writer.u32(static_cast<uint32_t>(blocks.size()));
  writer.u32(static_cast<uint32_t>(tables.size()));
  writer.u32((header.by_samples ? kBySamplesFlag : 0) | (header.want_dense ? kWantDenseFlag : 0));
  writer.bytes(header.configs.data(), header.configs.size_bytes());
  write_block_headers(blocks, &writer);
  for (const TableRef& ref : tables) {
    writer.u32(ref.table);
    writer.u32(ref.dim);
    writer.u64(ref.row_count);
  }
  FilledPush filled;
  write_block_sections(blocks, &writer, &filled);
  filled.keys.reserve(tables.size());
  filled.rows.reserve(tables.size());
  for (const TableRef& ref : tables) {
    filled.keys.push_back(writer.section<int64_t>(ref.row_count));
    filled.rows.push_back(writer.section<float>(ref.row_count * ref.dim));
  }
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
  view.header.clip_value = finite(reader.f64(), "clip value");
  view.header.clip_norm = finite(reader.f64(), "clip norm");
  const uint32_t config_count = reader.u32();
  const uint32_t block_count = reader.u32();
  const uint32_t table_count = reader.u32();
  const uint32_t flags = reader.u32();
  if (flags > (kBySamplesFlag | kWantDenseFlag)) wire::refuse("a push with unknown flags");
  view.header.by_samples = (flags & kBySamplesFlag) != 0;
  view.header.want_dense = (flags & kWantDenseFlag) != 0;
  wire::check_equal(config_count, layout.configs.size(), "optimizer configurations of a push");
  view.header.configs = reader.array<kernels::OptimizerConfig>(config_count);
  for (const auto& config : view.header.configs) wire::check_config(config);
  const auto blocks = read_block_headers(&reader, block_count, layout);
  const auto tables = read_table_headers(&reader, table_count, layout);
  view.blocks = read_block_sections(&reader, blocks);
  view.tables.reserve(tables.size());
  for (const TableHeader& header : tables) {
    const TableSpec& spec = layout.tables[header.table];
    TableSection section{.table = header.table, .keys = {}, .rows = {}};
    section.keys = reader.array<int64_t>(header.row_count);
    section.rows = reader.array<float>(wire::checked_multiply(header.row_count, spec.dim));
    wire::check_keys(section.keys, spec);
    view.tables.push_back(section);
  }
  reader.expect_end();
  return view;
}

FilledPush layout_dense(Version version, std::span<const BlockRef> blocks, const Pool& pool) {
  wire::check_order(blocks, &BlockRef::block, "block");
  wire::BulkWriter writer(wire::checked_add(kDenseFixedBytes, dense_bytes(blocks)), pool);
  writer.u64(version.round);
  writer.u64(version.samples);
  writer.u32(static_cast<uint32_t>(blocks.size()));
  writer.u32(0);
  write_block_headers(blocks, &writer);
  FilledPush filled;
  write_block_sections(blocks, &writer, &filled);
  filled.payload = writer.finish();
  return filled;
}

DenseView decode_dense(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Reader reader(payload);
  DenseView view;
  view.version.round = reader.u64();
  view.version.samples = reader.u64();
  const uint32_t count = reader.u32();
  wire::skip_zero(&reader);
  const auto headers = read_block_headers(&reader, count, layout);
  view.blocks = read_block_sections(&reader, headers);
  reader.expect_end();
  return view;
}

}  // namespace cpudist::core
