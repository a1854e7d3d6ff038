// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Payloads of table rows and of stored state: pull, its reply, store and fetch.
#include "wire/rows.h"

#include "wire/bulk.h"
#include "wire/fields.h"
#include "wire/sections.h"

namespace cpudist::wire {

// Heads of what a store holds.
template <typename V>
void fields(V& v, Of<V, TableRef>& m) {
  v.number(m.table);
  v.number(m.dim);
  v.number(m.row_count);
  v.number(m.state_elements);
  v.flag32(m.counts, "counts of a table in a store");
  v.number(m.step);
}

template <typename V>
void fields(V& v, Of<V, BlockRef>& m) {
  v.number(m.block);
  v.flag32(m.average, "average of a block in a store");
  v.number(m.size_bytes);
  v.number(m.state_bytes);
  v.number(m.step);
}

template <typename V>
void fields(V& v, Of<V, FetchRequest>& m) {
  v.flag32(m.blocks, "fetch request");
  v.number(m.parameter);
  v.number(m.table);
  v.zero();
  const uint64_t count = v.count64(m.keys);
  v.elements(m.keys, count);
}

namespace {

constexpr uint64_t kCountsBytes = 8;
constexpr uint64_t kPullFixedBytes = 16;
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
    if (ref.average) add(ref.size_bytes, 1);
  }
  return size;
}

void write_store_headers(std::span<const BlockRef> blocks, std::span<const TableRef> tables,
                         BulkWriter* writer) {
  writer->u32(static_cast<uint32_t>(tables.size()));
  writer->u32(static_cast<uint32_t>(blocks.size()));
  Put<BulkWriter> put(writer);
  for (const TableRef& ref : tables) fields(put, ref);
  for (const BlockRef& ref : blocks) fields(put, ref);
}

std::vector<TableRef> read_store_tables(Reader* reader, uint32_t count,
                                        const ParamSetLayout& layout) {
  std::vector<TableRef> refs;
  Take(reader).items(refs, count, kStoreHeaderBytes, "tables");
  uint64_t next_id = 0;
  for (const TableRef& ref : refs) {
    check_id(ref.table, layout.tables.size(), &next_id, "table");
    check_equal(ref.dim, layout.tables[ref.table].dim, "dim of a table");
  }
  return refs;
}

std::vector<BlockRef> read_store_blocks(Reader* reader, uint32_t count,
                                        const ParamSetLayout& layout) {
  std::vector<BlockRef> refs;
  Take(reader).items(refs, count, kStoreHeaderBytes, "blocks");
  uint64_t next_id = 0;
  for (const BlockRef& ref : refs) {
    check_id(ref.block, layout.blocks.size(), &next_id, "block");
    const BlockSpec& spec = layout.blocks[ref.block];
    const uint64_t element_bytes = size_of(spec.dtype);
    check_equal(ref.size_bytes, spec.elements * element_bytes, "bytes of a block");
    if (ref.state_bytes % element_bytes != 0) {
      refuse("the state of a block is not a whole number of elements");
    }
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

Buffer encode(const FetchRequest& message) { return write_message(message); }

FetchRequest decode_fetch(std::span<const uint8_t> payload) {
  return read_message<FetchRequest>(payload);
}

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
  BulkWriter writer(checked_add(kPullFixedBytes, key_list_bytes(tables)), pool);
  writer.u32(static_cast<uint32_t>(tables.size()));
  writer.u32(0);
  writer.u64(step);
  write_key_headers(tables, &writer);
  FilledKeys filled;
  filled.keys = key_sections(tables, &writer);
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
  const auto headers = read_key_headers(&reader, count, layout);
  std::vector<PullTable> tables = read_key_lists(&reader, headers, layout);
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
    filled.block_average.push_back(ref.average ? writer.section<uint8_t>(ref.size_bytes) : nullptr);
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
    BlockValues values{
        .block = ref.block, .step = ref.step, .weights = {}, .state = {}, .average = {}};
    values.weights = reader.array<uint8_t>(ref.size_bytes);
    values.state = reader.array<uint8_t>(ref.state_bytes);
    if (ref.average) values.average = reader.array<uint8_t>(ref.size_bytes);
    view.blocks.push_back(values);
  }
  reader.expect_end();
  return view;
}

}  // namespace cpudist::wire
