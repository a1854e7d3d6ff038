// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Payloads with sections: push, dense and changes. Pulls and their answers stand in
// codec_rows.cpp.

#include "wire/codec/codec.h"

#include <cstring>
#include <utility>

#include "kernels/gather_scatter.h"
#include "wire/bulk.h"
#include "wire/codec/parts.h"
#include "wire/codec/values.h"

namespace cpudist::wire {
namespace {

struct Sections {
  std::vector<DenseSection> blocks;
  std::vector<TableSection> tables;
  std::vector<PullTable> held;
};

Sections read_plain(SectionKind kind, std::span<const uint8_t> plain,
                    const ParamSetLayout& layout) {
  switch (kind) {
    case SectionKind::kPush: {
      PushView view = decode_push(plain, layout);
      return {std::move(view.blocks), std::move(view.tables), std::move(view.holds.tables)};
    }
    case SectionKind::kDense: {
      DenseView view = decode_dense(plain, layout);
      return {std::move(view.blocks), std::move(view.tables), {}};
    }
    case SectionKind::kChanges: {
      ChangesView view = decode_changes(plain, layout);
      return {std::move(view.blocks), std::move(view.tables), {}};
    }
  }
  throw Error(ErrorCode::kInternal, "no payload with sections");
}

// Keys in order, and the rows that belong to them.
struct SortedRows {
  std::vector<int64_t> keys_memory;
  std::vector<float> rows_memory;
  std::span<const int64_t> keys;
  const float* rows;
};

SortedRows sorted(const TableSection& section, size_t dim) {
  SortedRows found;
  found.keys = section.keys;
  found.rows = section.rows.data();
  if (increase(section.keys)) return found;
  const auto order = order_of(section.keys);
  found.keys_memory.resize(order.size());
  found.rows_memory.resize(order.size() * dim);
  for (size_t i = 0; i < order.size(); ++i) found.keys_memory[i] = section.keys[order[i]];
  const size_t row_bytes = dim * sizeof(float);
  kernels::gather_rows(found.rows, row_bytes, order.data(), order.size(), row_bytes,
                       found.rows_memory.data(), row_bytes);
  found.keys = found.keys_memory;
  found.rows = found.rows_memory.data();
  return found;
}

// `size_bytes`: plain; 0 where the values came before as a part.
uint64_t coded_block_bytes_of(const BlockSpec& spec, WireDType dtype, uint64_t size_bytes) {
  if (size_bytes == 0) return 0;
  if (spec.dtype == DType::kFloat64) return section_bytes(spec.elements, sizeof(double));
  return coded_block_bytes(dtype, spec.elements);
}

void encode_block_of(const BlockSpec& spec, WireDType dtype, const DenseSection& section,
                     BulkWriter* writer) {
  if (section.values.empty()) return;
  if (spec.dtype == DType::kFloat64) {
    writer->bytes(section.values.data(), section.values.size());
    return;
  }
  encode_block(dtype, reinterpret_cast<const float*>(section.values.data()), spec.elements,
               writer->section<uint8_t>(coded_block_bytes(dtype, spec.elements)));
}

void decode_block_of(const BlockSpec& spec, WireDType dtype, Reader* reader, uint8_t* out) {
  if (spec.dtype == DType::kFloat64) {
    const auto values = reader->array<double>(spec.elements);
    if (!values.empty()) std::memcpy(out, values.data(), values.size_bytes());
    return;
  }
  decode_block_into(dtype, reader, spec.elements, reinterpret_cast<float*>(out));
}

// What stands before the values of a coded payload.
struct Heads {
  std::span<const uint8_t> bytes;  // the head and the headers of sections, as in a plain payload
  std::vector<BlockHeader> blocks;
  std::vector<TableHeader> tables;
  HoldsHead holds;
};

Heads read_heads(SectionKind kind, Reader* reader, const ParamSetLayout& layout) {
  const std::span<const uint8_t> rest = reader->rest();
  const SectionCounts counts = read_counts(kind, rest);
  Heads heads;
  reader->array<uint8_t>(counts.head_bytes);
  heads.blocks = read_block_headers(reader, counts.blocks, layout, kind == SectionKind::kPush);
  heads.tables = read_table_headers(reader, counts.tables, layout);
  heads.bytes = rest.first(rest.size() - reader->remaining());
  if (!counts.holds) return heads;
  heads.holds = read_holds_head(reader->rest(), layout);
  reader->array<uint8_t>(heads.holds.bytes.size());
  return heads;
}

// The plain size; refuses heads that promise more than the bytes behind them can hold.
uint64_t plain_bytes(const Heads& heads, const ParamSetLayout& layout, WireDType dtype,
                     uint64_t remaining) {
  PlainSize size(remaining);
  size.add(heads.bytes.size() + heads.holds.bytes.size(), 0);
  for (const BlockHeader& header : heads.blocks) {
    size.add(padded(header.size_bytes),
             coded_block_bytes_of(layout.blocks[header.block], dtype, header.size_bytes));
  }
  for (const TableHeader& header : heads.tables) {
    const TableSpec& spec = layout.tables[header.table];
    size.add_keys(header.row_count, spec);
    const uint64_t elements = checked_multiply(header.row_count, spec.dim);
    size.add(section_bytes(elements, sizeof(float)),
             coded_rows_bytes(dtype, header.row_count, spec.dim));
  }
  for (const TableHeader& header : heads.holds.tables) {
    size.add_keys(header.row_count, layout.tables[header.table]);
  }
  return size.checked();
}

}  // namespace

Allocate allocate_from(Pool pool) {
  return [pool = std::move(pool)](uint64_t size_bytes) {
    return Buffer(static_cast<size_t>(size_bytes), pool);
  };
}

Buffer code_sections(SectionKind kind, std::span<const uint8_t> plain, const ParamSetLayout& layout,
                     const Coding& coding, const Pool& pool) {
  const Sections sections = read_plain(kind, plain, layout);
  const SectionCounts counts = read_counts(kind, plain);
  const uint64_t head_bytes =
      counts.head_bytes + kSectionHeaderBytes * (uint64_t{counts.blocks} + counts.tables);
  std::span<const uint8_t> holds_head;
  uint64_t size = kCodingBytes + head_bytes;
  KeyCodes keys;
  std::vector<SortedRows> tables;
  for (const DenseSection& section : sections.blocks) {
    size +=
        coded_block_bytes_of(layout.blocks[section.block], coding.values, section.values.size());
  }
  for (const TableSection& section : sections.tables) {
    const size_t dim = layout.tables[section.table].dim;
    tables.push_back(sorted(section, dim));
    keys.add(tables.back().keys, layout.tables[section.table]);
    size += coded_rows_bytes(coding.values, tables.back().keys.size(), dim);
  }
  for (const PullTable& held : sections.held) {
    keys.add_unordered(held.keys, layout.tables[held.table]);
  }
  if (counts.holds) {
    const uint64_t values_bytes = plain_values_bytes(sections.blocks, sections.tables);
    holds_head = read_holds_head(plain.subspan(head_bytes + values_bytes), layout).bytes;
  }
  BulkWriter writer(size + holds_head.size() + keys.size_bytes(), pool);
  write_coding(coding, &writer);
  writer.bytes(plain.data(), head_bytes);
  writer.bytes(holds_head.data(), holds_head.size());
  for (const DenseSection& section : sections.blocks) {
    encode_block_of(layout.blocks[section.block], coding.values, section, &writer);
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    const size_t dim = layout.tables[sections.tables[i].table].dim;
    const size_t rows = tables[i].keys.size();
    keys.write(i, &writer);
    encode_rows(coding.values, tables[i].rows, rows, dim,
                writer.section<uint8_t>(coded_rows_bytes(coding.values, rows, dim)));
  }
  for (size_t i = 0; i < sections.held.size(); ++i) keys.write(tables.size() + i, &writer);
  return writer.finish();
}

Buffer code_dense(Version version, uint64_t cut_wanted, std::span<const DenseSection> blocks,
                  const ParamSetLayout& layout, const Coding& coding, const Pool& pool) {
  uint64_t size = kCodingBytes + kDenseFixedBytes + kSectionHeaderBytes * blocks.size();
  std::vector<BlockRef> refs;
  refs.reserve(blocks.size());
  for (const DenseSection& section : blocks) {
    BlockRef& ref = refs.emplace_back();
    ref.block = section.block;
    ref.size_bytes = section.values.size();
    size += coded_block_bytes_of(layout.blocks[ref.block], coding.values, ref.size_bytes);
  }
  check_order<BlockRef>(refs, &BlockRef::block, "block");
  BulkWriter writer(size, pool);
  write_coding(coding, &writer);
  write_dense_head(version, cut_wanted, refs.size(), 0, &writer);
  write_section_headers(refs, {}, &writer);
  for (const DenseSection& section : blocks) {
    encode_block_of(layout.blocks[section.block], coding.values, section, &writer);
  }
  return writer.finish();
}

Decoded decode_sections(SectionKind kind, std::span<const uint8_t> coded,
                        const ParamSetLayout& layout, const Allocate& allocate) {
  Reader reader(coded);
  Decoded decoded;
  decoded.coding = take_coding(&reader);
  const WireDType dtype = decoded.coding.values;
  const Heads heads = read_heads(kind, &reader, layout);
  PlainWriter writer(allocate, plain_bytes(heads, layout, dtype, reader.remaining()));
  writer.bytes(heads.bytes);
  for (const BlockHeader& header : heads.blocks) {
    if (header.size_bytes == 0) continue;
    decode_block_of(layout.blocks[header.block], dtype, &reader,
                    writer.section<uint8_t>(header.size_bytes));
  }
  for (const TableHeader& header : heads.tables) {
    const TableSpec& spec = layout.tables[header.table];
    read_keys(&reader, spec, {writer.section<int64_t>(header.row_count), header.row_count});
    decode_rows_into(dtype, &reader, header.row_count, spec.dim,
                     writer.section<float>(header.row_count * spec.dim));
  }
  writer.bytes(heads.holds.bytes);
  for (const TableHeader& header : heads.holds.tables) {
    read_keys(&reader, layout.tables[header.table],
              {writer.section<int64_t>(header.row_count), header.row_count});
  }
  reader.expect_end();
  decoded.payload = writer.finish();
  return decoded;
}

}  // namespace cpudist::wire
