// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "wire/sections.h"

#include <string>

namespace cpudist::wire {
namespace {

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

uint64_t key_list_bytes(std::span<const TableRef> tables) {
  uint64_t size = 0;
  for (const TableRef& ref : tables) {
    size = checked_add(size, kSectionHeaderBytes);
    size = checked_add(size, section_bytes(ref.row_count, sizeof(int64_t)));
  }
  return size;
}

void write_key_headers(std::span<const TableRef> tables, BulkWriter* writer) {
  for (const TableRef& ref : tables) {
    writer->u32(ref.table);
    writer->u32(0);
    writer->u64(ref.row_count);
  }
}

std::vector<int64_t*> key_sections(std::span<const TableRef> tables, BulkWriter* writer) {
  std::vector<int64_t*> keys;
  keys.reserve(tables.size());
  for (const TableRef& ref : tables) keys.push_back(writer->section<int64_t>(ref.row_count));
  return keys;
}

std::vector<TableHeader> read_key_headers(Reader* reader, uint32_t count,
                                          const ParamSetLayout& layout) {
  check_count(*reader, count, kSectionHeaderBytes, "tables");
  std::vector<TableHeader> headers;
  headers.reserve(count);
  uint64_t next_id = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t table = reader->u32();
    skip_zero(reader);
    check_id(table, layout.tables.size(), &next_id, "table");
    headers.push_back({table, reader->u64()});
  }
  return headers;
}

std::vector<PullTable> read_key_lists(Reader* reader, std::span<const TableHeader> headers,
                                      const ParamSetLayout& layout) {
  std::vector<PullTable> tables;
  tables.reserve(headers.size());
  for (const TableHeader& header : headers) {
    tables.push_back({header.table, reader->array<int64_t>(header.row_count)});
    check_keys(tables.back().keys, layout.tables[header.table]);
  }
  return tables;
}

std::vector<BlockHeader> read_block_headers(Reader* reader, uint32_t count,
                                            const ParamSetLayout& layout, bool in_parts) {
  check_count(*reader, count, kSectionHeaderBytes, "blocks");
  std::vector<BlockHeader> headers;
  headers.reserve(count);
  uint64_t next_id = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t block = reader->u32();
    skip_zero(reader);
    const uint64_t size_bytes = reader->u64();
    check_id(block, layout.blocks.size(), &next_id, "block");
    const BlockSpec& spec = layout.blocks[block];
    if (!in_parts || size_bytes != 0) {
      check_equal(size_bytes, spec.elements * size_of(spec.dtype), "bytes of a block");
    }
    headers.push_back({block, size_bytes});
  }
  return headers;
}

std::vector<TableHeader> read_table_headers(Reader* reader, uint32_t count,
                                            const ParamSetLayout& layout) {
  check_count(*reader, count, kSectionHeaderBytes, "tables");
  std::vector<TableHeader> headers;
  headers.reserve(count);
  uint64_t next_id = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t table = reader->u32();
    const uint32_t dim = reader->u32();
    const uint64_t row_count = reader->u64();
    check_id(table, layout.tables.size(), &next_id, "table");
    check_equal(dim, layout.tables[table].dim, "dim of a table");
    headers.push_back({table, row_count});
  }
  return headers;
}

uint64_t block_bytes(std::span<const BlockRef> blocks) {
  uint64_t size = 0;
  for (const BlockRef& ref : blocks) {
    size = checked_add(size, kSectionHeaderBytes);
    size = checked_add(size, padded(ref.size_bytes));
  }
  return size;
}

uint64_t table_bytes(std::span<const TableRef> tables) {
  uint64_t size = 0;
  for (const TableRef& ref : tables) {
    size = checked_add(size, kSectionHeaderBytes);
    size = checked_add(size, section_bytes(ref.row_count, sizeof(int64_t)));
    const uint64_t elements = checked_multiply(ref.row_count, ref.dim);
    size = checked_add(size, section_bytes(elements, sizeof(float)));
  }
  return size;
}

void write_section_headers(std::span<const BlockRef> blocks, std::span<const TableRef> tables,
                           BulkWriter* writer) {
  for (const BlockRef& ref : blocks) {
    writer->u32(ref.block);
    writer->u32(0);
    writer->u64(ref.size_bytes);
  }
  for (const TableRef& ref : tables) {
    writer->u32(ref.table);
    writer->u32(ref.dim);
    writer->u64(ref.row_count);
  }
}

FilledPush write_sections(std::span<const BlockRef> blocks, std::span<const TableRef> tables,
                          BulkWriter* writer) {
  write_section_headers(blocks, tables, writer);
  FilledPush filled;
  filled.blocks.reserve(blocks.size());
  for (const BlockRef& ref : blocks) {
    filled.blocks.push_back(writer->section<uint8_t>(ref.size_bytes));
  }
  filled.keys.reserve(tables.size());
  filled.rows.reserve(tables.size());
  for (const TableRef& ref : tables) {
    filled.keys.push_back(writer->section<int64_t>(ref.row_count));
    filled.rows.push_back(writer->section<float>(ref.row_count * ref.dim));
  }
  return filled;
}

void read_sections(Reader* reader, uint32_t block_count, uint32_t table_count,
                   const ParamSetLayout& layout, std::vector<DenseSection>* blocks,
                   std::vector<TableSection>* tables, bool in_parts) {
  const auto block_headers = read_block_headers(reader, block_count, layout, in_parts);
  const auto table_headers = read_table_headers(reader, table_count, layout);
  *blocks = read_block_sections(reader, block_headers);
  tables->reserve(table_headers.size());
  for (const TableHeader& header : table_headers) {
    const TableSpec& spec = layout.tables[header.table];
    TableSection section{.table = header.table, .keys = {}, .rows = {}};
    section.keys = reader->array<int64_t>(header.row_count);
    section.rows = reader->array<float>(checked_multiply(header.row_count, spec.dim));
    check_keys(section.keys, spec);
    tables->push_back(section);
  }
}

void check_keys(std::span<const int64_t> keys, const TableSpec& table) {
  if (table.open) return;
  // Accumulated without a branch: one pass at memory speed. A negative key is a huge unsigned one.
  bool outside = false;
  for (const int64_t key : keys) outside |= static_cast<uint64_t>(key) >= table.rows;
  if (outside) {
    refuse("a key of table '" + table.name.substr(0, 200) + "' is outside its " +
           std::to_string(table.rows) + " rows");
  }
}

}  // namespace cpudist::wire
