// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Payloads of table rows and of stored state: pull, its reply, store and fetch.

#include "wire/bulk.h"
#include "wire/messages.h"

namespace cpudist::wire {
namespace {

constexpr uint64_t kCountsBytes = 8;
constexpr uint64_t kPullFixedBytes = 16;
constexpr uint64_t kPullHeaderBytes = 16;
constexpr uint64_t kStoreHeaderBytes = 32;

uint64_t store_bytes(std::span<const BlockRef> blocks, std::span<const TableRef> tables) {
  uint64_t size = kCountsBytes;
  const auto add = [&size](uint64_t count, uint64_t element_bytes) {
    size = checked_add(size, section_bytes(count, element_bytes));
  };
  for (const TableRef& ref : tables) {
    add(kStoreHeaderBytes, 1);
    add(ref.row_count, sizeof(int64_t));
    add(checked_multiply(ref.row_count, ref.dim), sizeof(float));
    add(checked_multiply(ref.row_count, ref.state_elements), sizeof(float));
    if (ref.counts) add(ref.row_count, sizeof(uint32_t));
  }
  for (const BlockRef& ref : blocks) {
    add(kStoreHeaderBytes, 1);
    add(ref.size_bytes, 1);
    add(ref.state_bytes, 1);
  }
  return size;
}

void write_store_headers(std::span<const BlockRef> blocks, std::span<const TableRef> tables,
                         BulkWriter* writer) {
  writer->u32(static_cast<uint32_t>(tables.size()));
  writer->u32(static_cast<uint32_t>(blocks.size()));
  for (const TableRef& ref : tables) {
    writer->u32(ref.table);
    writer->u32(ref.dim);
    writer->u64(ref.row_count);
    writer->u32(ref.state_elements);
    writer->u32(ref.counts ? 1 : 0);
    writer->u64(ref.step);
  }
  for (const BlockRef& ref : blocks) {
    writer->u32(ref.block);
    writer->u32(0);
    writer->u64(ref.size_bytes);
    writer->u64(ref.state_bytes);
    writer->u64(ref.step);
  }
}

std::vector<TableRef> read_store_tables(Reader* reader, uint32_t count,
                                        const ParamSetLayout& layout) {
  check_count(*reader, count, kStoreHeaderBytes, "tables");
  std::vector<TableRef> refs;
  refs.reserve(count);
  uint64_t next_id = 0;
  for (uint32_t i = 0; i < count; ++i) {
    TableRef ref;
    ref.table = reader->u32();
    ref.dim = reader->u32();
    ref.row_count = reader->u64();
    ref.state_elements = reader->u32();
    const uint32_t counts = reader->u32();
    ref.step = reader->u64();
    check_id(ref.table, layout.tables.size(), &next_id, "table");
    check_equal(ref.dim, layout.tables[ref.table].dim, "dim of a table");
    if (counts > 1) refuse("store: the flag for counts is neither 0 nor 1");
    ref.counts = counts == 1;
    refs.push_back(ref);
  }
  return refs;
}

std::vector<BlockRef> read_store_blocks(Reader* reader, uint32_t count,
                                        const ParamSetLayout& layout) {
  check_count(*reader, count, kStoreHeaderBytes, "blocks");
  std::vector<BlockRef> refs;
  refs.reserve(count);
  uint64_t next_id = 0;
  for (uint32_t i = 0; i < count; ++i) {
    BlockRef ref;
    ref.block = reader->u32();
    skip_zero(reader);
    ref.size_bytes = reader->u64();
    ref.state_bytes = reader->u64();
    ref.step = reader->u64();
    check_id(ref.block, layout.blocks.size(), &next_id, "block");
    const BlockSpec& spec = layout.blocks[ref.block];
    const uint64_t element_bytes = size_of(spec.dtype);
    check_equal(ref.size_bytes, spec.elements * element_bytes, "bytes of a block");
    if (ref.state_bytes % element_bytes != 0) {
      refuse("the state of a block is not a whole number of elements");
    }
    refs.push_back(ref);
  }
  return refs;
}

TableRows read_store_rows(Reader* reader, const TableRef& ref, const TableSpec& spec) {
  TableRows rows;
  rows.table = ref.table;
  rows.step = ref.step;
  rows.keys = reader->array<int64_t>(ref.row_count);
  rows.weights = reader->array<float>(checked_multiply(ref.row_count, ref.dim));
  rows.state = reader->array<float>(checked_multiply(ref.row_count, ref.state_elements));
  if (ref.counts) rows.counts = reader->array<uint32_t>(ref.row_count);
  check_keys(rows.keys, spec);
  return rows;
}

}  // namespace

Buffer encode_pull_dense(uint64_t step) {
  Writer writer;
  writer.u64(step);
  return writer.finish();
}

uint64_t decode_pull_dense(std::span<const uint8_t> payload) {
  if (payload.empty()) return 0;
  Reader reader(payload);
  const uint64_t step = reader.u64();
  reader.expect_end();
  return step;
}

FilledKeys layout_pull(std::span<const TableRef> tables, const Pool& pool, uint64_t step) {
  check_order(tables, &TableRef::table, "table");
  uint64_t size = kPullFixedBytes;
  for (const TableRef& ref : tables) {
    size = checked_add(size, kPullHeaderBytes);
    size = checked_add(size, section_bytes(ref.row_count, sizeof(int64_t)));
  }
  BulkWriter writer(size, pool);
  writer.u32(static_cast<uint32_t>(tables.size()));
  writer.u32(0);
  writer.u64(step);
  for (const TableRef& ref : tables) {
    writer.u32(ref.table);
    writer.u32(0);
    writer.u64(ref.row_count);
  }
  FilledKeys filled;
  filled.keys.reserve(tables.size());
  for (const TableRef& ref : tables) {
    filled.keys.push_back(writer.section<int64_t>(ref.row_count));
  }
  filled.payload = writer.finish();
  return filled;
}

std::vector<PullTable> decode_pull(std::span<const uint8_t> payload, const ParamSetLayout& layout,
                                   uint64_t* step) {
  Reader reader(payload);
  const uint32_t count = reader.u32();
  skip_zero(&reader);
  const uint64_t told = reader.u64();
  if (step != nullptr) *step = told;
  check_count(reader, count, kPullHeaderBytes, "tables");
  struct Header {
    uint32_t table;
    uint64_t row_count;
  };
  std::vector<Header> headers;
  headers.reserve(count);
  uint64_t next_id = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t table = reader.u32();
    skip_zero(&reader);
    check_id(table, layout.tables.size(), &next_id, "table");
    headers.push_back({table, reader.u64()});
  }
  std::vector<PullTable> tables;
  tables.reserve(count);
  for (const Header& header : headers) {
    tables.push_back({header.table, reader.array<int64_t>(header.row_count)});
    check_keys(tables.back().keys, layout.tables[header.table]);
  }
  reader.expect_end();
  return tables;
}

FilledRows layout_rows(Version version, std::span<const TableRef> tables, const Pool& pool) {
  uint64_t size = 2 * sizeof(uint64_t);
  for (const TableRef& ref : tables) {
    const uint64_t elements = checked_multiply(ref.row_count, ref.dim);
    size = checked_add(size, section_bytes(elements, sizeof(float)));
  }
  BulkWriter writer(size, pool);
  writer.u64(version.round);
  writer.u64(version.samples);
  FilledRows filled;
  filled.rows.reserve(tables.size());
  for (const TableRef& ref : tables) {
    filled.rows.push_back(writer.section<float>(ref.row_count * ref.dim));
  }
  filled.payload = writer.finish();
  return filled;
}

std::vector<std::span<const float>> decode_rows(std::span<const uint8_t> payload,
                                                std::span<const TableRef> asked, Version* version) {
  Reader reader(payload);
  version->round = reader.u64();
  version->samples = reader.u64();
  std::vector<std::span<const float>> rows;
  rows.reserve(asked.size());
  for (const TableRef& ref : asked) {
    rows.push_back(reader.array<float>(checked_multiply(ref.row_count, ref.dim)));
  }
  reader.expect_end();
  return rows;
}

FilledStore layout_store(std::span<const BlockRef> blocks, std::span<const TableRef> tables,
                         const Pool& pool) {
  check_order(blocks, &BlockRef::block, "block");
  check_order(tables, &TableRef::table, "table");
  BulkWriter writer(store_bytes(blocks, tables), pool);
  write_store_headers(blocks, tables, &writer);
  FilledStore filled;
  for (const TableRef& ref : tables) {
    filled.keys.push_back(writer.section<int64_t>(ref.row_count));
    filled.weights.push_back(writer.section<float>(ref.row_count * ref.dim));
    float* state = writer.section<float>(ref.row_count * ref.state_elements);
    filled.state.push_back(ref.state_elements > 0 ? state : nullptr);
    filled.counts.push_back(ref.counts ? writer.section<uint32_t>(ref.row_count) : nullptr);
  }
  for (const BlockRef& ref : blocks) {
    filled.block_weights.push_back(writer.section<uint8_t>(ref.size_bytes));
    uint8_t* state = writer.section<uint8_t>(ref.state_bytes);
    filled.block_state.push_back(ref.state_bytes > 0 ? state : nullptr);
  }
  filled.payload = writer.finish();
  return filled;
}

StoreView decode_store(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Reader reader(payload);
  const uint32_t table_count = reader.u32();
  const uint32_t block_count = reader.u32();
  const auto tables = read_store_tables(&reader, table_count, layout);
  const auto blocks = read_store_blocks(&reader, block_count, layout);
  StoreView view;
  view.tables.reserve(tables.size());
  for (const TableRef& ref : tables) {
    view.tables.push_back(read_store_rows(&reader, ref, layout.tables[ref.table]));
  }
  view.blocks.reserve(blocks.size());
  for (const BlockRef& ref : blocks) {
    BlockValues values{.block = ref.block, .step = ref.step, .weights = {}, .state = {}};
    values.weights = reader.array<uint8_t>(ref.size_bytes);
    values.state = reader.array<uint8_t>(ref.state_bytes);
    view.blocks.push_back(values);
  }
  reader.expect_end();
  return view;
}

}  // namespace cpudist::wire
