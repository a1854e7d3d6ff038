// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Pulls of rows, and their answers.

#include "wire/codec/codec.h"
#include "wire/codec/parts.h"
#include "wire/codec/values.h"

namespace cpudist::wire {
namespace {

constexpr uint64_t kCodedPullFixedBytes = 16;
constexpr uint64_t kVersionBytes = 16;

}  // namespace

Buffer code_pull(std::span<const uint8_t> plain, const ParamSetLayout& layout, const Coding& coding,
                 const Pool& pool) {
  const auto tables = decode_pull(plain, layout);
  KeyCodes keys;
  for (const PullTable& table : tables) {
    if (!increase(table.keys)) {
      throw Error(ErrorCode::kInternal, "keys of a coded pull do not increase");
    }
    keys.add(table.keys, layout.tables[table.table]);
  }
  const uint64_t head_bytes = kCodedPullFixedBytes + kSectionHeaderBytes * tables.size();
  BulkWriter writer(kCodingBytes + head_bytes + keys.size_bytes(), pool);
  write_coding(coding, &writer);
  writer.bytes(plain.data(), head_bytes);
  for (size_t i = 0; i < tables.size(); ++i) keys.write(i, &writer);
  return writer.finish();
}

Decoded decode_coded_pull(std::span<const uint8_t> coded, const ParamSetLayout& layout,
                          const Allocate& allocate) {
  Reader reader(coded);
  Decoded decoded;
  decoded.coding = take_coding(&reader);
  const std::span<const uint8_t> rest = reader.rest();
  const uint32_t count = reader.u32();
  skip_zero(&reader);
  reader.u64();
  check_count(reader, count, kSectionHeaderBytes, "tables");
  std::vector<TableHeader> tables;
  uint64_t next_id = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t table = reader.u32();
    skip_zero(&reader);
    check_id(table, layout.tables.size(), &next_id, "table");
    tables.push_back({table, reader.u64()});
  }
  const auto head = rest.first(rest.size() - reader.remaining());
  PlainSize size(reader.remaining());
  size.add(head.size(), 0);
  for (const auto& header : tables) size.add_keys(header.row_count, layout.tables[header.table]);
  PlainWriter writer(allocate, size.checked());
  writer.bytes(head);
  for (const auto& header : tables) {
    read_keys(&reader, layout.tables[header.table],
              {writer.section<int64_t>(header.row_count), header.row_count});
  }
  reader.expect_end();
  decoded.payload = writer.finish();
  return decoded;
}

Buffer encode_coded_pull_dense(const Coding& coding, uint64_t step) {
  BulkWriter writer(kCodingBytes + sizeof(step), nullptr);
  write_coding(coding, &writer);
  writer.u64(step);
  return writer.finish();
}

uint64_t decode_coded_pull_dense(std::span<const uint8_t> coded, Coding* coding) {
  Reader reader(coded);
  *coding = take_coding(&reader);
  return decode_pull_dense(reader.rest());
}

FilledRows layout_coded_rows(const Coding& coding, Version version, std::span<const TableRef> refs,
                             const Pool& pool) {
  uint64_t size = kCodingBytes + kVersionBytes;
  for (const TableRef& ref : refs) {
    size += coded_rows_bytes(WireDType::kFloat32, ref.row_count, ref.dim);
  }
  BulkWriter writer(size, pool);
  write_coding(coding, &writer);
  writer.u64(version.round);
  writer.u64(version.samples);
  FilledRows filled;
  for (const TableRef& ref : refs) {
    filled.rows.push_back(writer.section<float>(ref.row_count * ref.dim));
  }
  filled.payload = writer.finish();
  return filled;
}

std::span<const uint8_t> plain_rows_in(std::span<const uint8_t> coded) {
  Reader reader(coded);
  if (take_coding(&reader).values == WireDType::kFloat32) return reader.rest();
  return {};
}

Buffer code_rows(std::span<const uint8_t> plain, std::span<const TableRef> asked,
                 const Coding& coding, const Pool& pool) {
  Version version;
  const auto rows = decode_rows(plain, asked, &version);
  uint64_t size = kCodingBytes + kVersionBytes;
  for (const TableRef& ref : asked) size += coded_rows_bytes(coding.values, ref.row_count, ref.dim);
  BulkWriter writer(size, pool);
  write_coding(coding, &writer);
  writer.bytes(plain.data(), kVersionBytes);
  for (size_t i = 0; i < asked.size(); ++i) {
    const uint64_t bytes = coded_rows_bytes(coding.values, asked[i].row_count, asked[i].dim);
    encode_rows(coding.values, rows[i].data(), asked[i].row_count, asked[i].dim,
                writer.section<uint8_t>(bytes));
  }
  return writer.finish();
}

Decoded decode_coded_rows(std::span<const uint8_t> coded, std::span<const TableRef> asked,
                          const Allocate& allocate) {
  Reader reader(coded);
  Decoded decoded;
  decoded.coding = take_coding(&reader);
  const auto version = reader.array<uint8_t>(kVersionBytes);
  PlainSize size(reader.remaining());
  size.add(version.size(), 0);
  for (const TableRef& ref : asked) {
    const uint64_t elements = checked_multiply(ref.row_count, ref.dim);
    size.add(section_bytes(elements, sizeof(float)),
             coded_rows_bytes(decoded.coding.values, ref.row_count, ref.dim));
  }
  PlainWriter writer(allocate, size.checked());
  writer.bytes(version);
  for (const TableRef& ref : asked) {
    decode_rows_into(decoded.coding.values, &reader, ref.row_count, ref.dim,
                     writer.section<float>(ref.row_count * ref.dim));
  }
  reader.expect_end();
  decoded.payload = writer.finish();
  return decoded;
}

}  // namespace cpudist::wire
