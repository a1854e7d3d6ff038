// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Blocks and table rows of a payload: the headers of all sections, then their values. For the files
// that encode and decode.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "wire/bulk.h"
#include "wire/layout.h"
#include "wire/push.h"
#include "wire/rows.h"

namespace cpudist::wire {

inline constexpr uint64_t kSectionHeaderBytes = 16;

struct BlockHeader {
  uint32_t block;
  uint64_t size_bytes;
};

struct TableHeader {
  uint32_t table;
  uint64_t row_count;
};

// Which payloads have sections, behind heads of their own.
enum class SectionKind : uint8_t { kPush, kDense, kChanges };

// What a payload with sections has, as the beginning of it says.
struct SectionCounts {
  uint64_t head_bytes = 0;  // up to the headers of sections
  uint32_t blocks = 0;
  uint32_t tables = 0;
  bool holds = false;
};
SectionCounts read_counts(SectionKind kind, std::span<const uint8_t> payload);

// The head of what a push holds, as it stands in its payload.
struct HoldsHead {
  std::span<const uint8_t> bytes;
  std::vector<TableHeader> tables;
};
HoldsHead read_holds_head(std::span<const uint8_t> payload, const ParamSetLayout& layout);

// Lists of keys, without rows: their headers, then the keys.
uint64_t key_list_bytes(std::span<const TableRef> tables);
void write_key_headers(std::span<const TableRef> tables, BulkWriter* writer);
std::vector<int64_t*> key_sections(std::span<const TableRef> tables, BulkWriter* writer);
std::vector<TableHeader> read_key_headers(Reader* reader, uint32_t count,
                                          const ParamSetLayout& layout);
std::vector<PullTable> read_key_lists(Reader* reader, std::span<const TableHeader> headers,
                                      const ParamSetLayout& layout);

// `in_parts`: a block may have no bytes, as its values came before.
std::vector<BlockHeader> read_block_headers(Reader* reader, uint32_t count,
                                            const ParamSetLayout& layout, bool in_parts = false);
std::vector<TableHeader> read_table_headers(Reader* reader, uint32_t count,
                                            const ParamSetLayout& layout);

// Bytes of the headers and values.
uint64_t block_bytes(std::span<const BlockRef> blocks);
uint64_t table_bytes(std::span<const TableRef> tables);

void write_section_headers(std::span<const BlockRef> blocks, std::span<const TableRef> tables,
                           BulkWriter* writer);
// Writes all headers, and leaves the values to be filled. The payload is still the writer's.
FilledPush write_sections(std::span<const BlockRef> blocks, std::span<const TableRef> tables,
                          BulkWriter* writer);

// What stands before the headers of sections in a dense payload.
inline constexpr uint64_t kDenseFixedBytes = 4 * 8 + 2 * 4;
void write_dense_head(Version version, uint64_t cut_wanted, size_t block_count, size_t table_count,
                      BulkWriter* writer);

void read_sections(Reader* reader, uint32_t block_count, uint32_t table_count,
                   const ParamSetLayout& layout, std::vector<DenseSection>* blocks,
                   std::vector<TableSection>* tables, bool in_parts = false);

}  // namespace cpudist::wire
