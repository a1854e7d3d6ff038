// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Blocks and table rows of a payload: the headers of all sections, then their values. For the files
// behind messages.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/messages.h"
#include "core/messages_bulk.h"

namespace cpudist::core::wire {

// Bytes of the headers and values.
uint64_t block_bytes(std::span<const BlockRef> blocks);
uint64_t table_bytes(std::span<const TableRef> tables);

// Writes all headers, and leaves the values to be filled. The payload is still the writer's.
FilledPush write_sections(std::span<const BlockRef> blocks, std::span<const TableRef> tables,
                          BulkWriter* writer);

void read_sections(Reader* reader, uint32_t block_count, uint32_t table_count,
                   const ParamSetLayout& layout, std::vector<DenseSection>* blocks,
                   std::vector<TableSection>* tables);

}  // namespace cpudist::core::wire
