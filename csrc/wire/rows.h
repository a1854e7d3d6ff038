// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of tables and values of blocks on their way: stored, fetched, pulled.
//
// Little-endian, as all payloads are; arrays start at multiples of 8 bytes so that they are read in
// place. Decoders return views into the payload, check every count against the bytes that are there
// with overflow-safe arithmetic, and throw Error(kProtocol).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "wire/layout.h"

namespace cpudist::wire {

// A run of rows of one table or one whole block. `state` holds state_elements per row (or for the
// block) or nothing = the optimizer's initial state. `counts`: updates so far, per row, or nothing.
struct TableRows {
  uint32_t table = 0;
  uint64_t step = 0;  // updates of the table as a whole
  std::span<const int64_t> keys;
  std::span<const float> weights;  // keys.size() * dim
  std::span<const float> state;
  std::span<const uint32_t> counts;
};

struct BlockValues {
  uint32_t block = 0;
  uint64_t step = 0;                 // updates of the block
  std::span<const uint8_t> weights;  // elements * size_of(dtype) bytes
  std::span<const uint8_t> state;    // same dtype, or empty
  std::span<const uint8_t> average;  // as the weights, or empty: it begins at them
};

struct StoreView {
  std::vector<TableRows> tables;
  std::vector<BlockValues> blocks;
};

inline constexpr uint32_t kEveryParameter = 0xffffffffu;

// kFetchState: blocks of the server and/or these rows. Trainers ask for blocks alone, and for rows
// by runs (runs.h).
struct FetchRequest {
  bool blocks = false;
  uint32_t parameter = kEveryParameter;  // with `blocks`: only blocks cut from this parameter
  uint32_t table = 0;
  std::span<const int64_t> keys;  // may be empty
};  // reply: encoded as a store; keys in the order asked

struct PullTable {
  uint32_t table = 0;
  std::span<const int64_t> keys;
};
// Reply to kPullRows: the version (2 x u64, no steps), then per table of the request, in its order,
// the rows (no keys).
//
// A pull for a batch to come tells, in the place of the step, the number of its prefetch with this
// bit set: which gradient uses the rows is known when that gradient is pushed.
inline constexpr uint64_t kPrefetchBit = 1ull << 63;
// In the place of the step: the averages are asked for, not the values. For no gradient.
inline constexpr uint64_t kAverages = 1ull << 62;
// kPullDense: the step or nothing; its reply is a DenseView with all blocks of that server.
//
// A pull tells for which gradient of this trainer it reads, counted from 1: the server keeps what
// it answers until that gradient has come, if gradients are compensated for delay. 0: for none.

// Large payloads are laid out first and filled in place, so that values are copied once, straight
// from their source. Each `layout_*` returns the payload with headers written and, in the same
// order as asked, pointers to the arrays to fill; block ids and table ids must each be strictly
// increasing, else Error(kInvalidArgument). Decoders check sizes against `layout` (dims, dtypes,
// element counts, known ids, ids increasing, 0 <= key < rows) and throw Error(kProtocol). Left to
// the receiver, who knows more: that keys are distinct, that a block's shard is this server, and in
// a store that the state has the length this optimizer needs.
struct BlockRef {
  uint32_t block = 0;
  uint64_t size_bytes = 0;
  uint64_t state_bytes = 0;  // store only
  uint64_t step = 0;         // store only
  bool average = false;      // store only: size_bytes of them
};
struct TableRef {
  uint32_t table = 0;
  uint64_t row_count = 0;
  uint32_t dim = 0;
  uint32_t state_elements = 0;  // per row; store only
  bool counts = false;          // store only
  uint64_t step = 0;            // store only
};
using Pool = std::shared_ptr<BufferPool>;

struct FilledRows {
  Buffer payload;
  std::vector<float*> rows;
};
struct FilledKeys {
  Buffer payload;
  std::vector<int64_t*> keys;
};
struct FilledStore {
  Buffer payload;
  std::vector<int64_t*> keys;
  std::vector<float*> weights;
  std::vector<float*> state;      // nullptr where the ref has none
  std::vector<uint32_t*> counts;  // nullptr where the ref has none
  std::vector<uint8_t*> block_weights;
  std::vector<uint8_t*> block_state;    // nullptr where the ref has none
  std::vector<uint8_t*> block_average;  // likewise
};

Buffer encode(const FetchRequest& message);
Buffer encode_pull_dense(uint64_t step);
FilledKeys layout_pull(std::span<const TableRef> tables, const Pool& pool, uint64_t step = 0);
FilledRows layout_rows(Version version, std::span<const TableRef> tables, const Pool& pool);
FilledStore layout_store(std::span<const BlockRef> blocks, std::span<const TableRef> tables,
                         const Pool& pool);

FetchRequest decode_fetch(std::span<const uint8_t> payload);
uint64_t decode_pull_dense(std::span<const uint8_t> payload);
std::vector<PullTable> decode_pull(std::span<const uint8_t> payload, const ParamSetLayout& layout,
                                   uint64_t* step = nullptr);
// Rows per table of the request `asked` (table ids and key counts known to the caller).
std::vector<std::span<const float>> decode_rows(std::span<const uint8_t> payload,
                                                std::span<const TableRef> asked, Version* version);
StoreView decode_store(std::span<const uint8_t> payload, const ParamSetLayout& layout);

}  // namespace cpudist::wire
