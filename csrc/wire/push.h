// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a trainer pushes, and what servers answer: gradients, dense values, changes of others.
// Laid out and decoded like rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "kernels/optimizers.h"
#include "wire/layout.h"
#include "wire/rows.h"

namespace cpudist::wire {

struct PushHeader {
  // kRounds: the round. kOnArrival: updates behind the dense values that the gradient was computed
  // on.
  uint64_t round = 0;
  uint64_t step = 0;        // kOnArrival: which gradient of this trainer, as in its pulls
  double weight = 1.0;      // this trainer's weight in the mean; 0 allowed
  uint64_t samples = 0;     // counted only
  uint64_t steps = 1;       // of the trainer's optimizer behind it; counted only
  bool by_samples = false;  // what `weight` is: a number of samples, or 1 for every trainer
  bool want_dense = true;   // kOnArrival: the reply brings every dense block of the server
  double clip_value = 0.0;  // > 0: clamp the averaged gradient elementwise
  double clip_norm = 0.0;   // > 0: two phases; the reply is a PushNorm, kCommit follows
  bool clip_each = false;   // clip_norm bounds each tensor's norm, not that of all together
  std::span<const kernels::OptimizerConfig> configs;  // as of this step; equal among trainers
};

struct DenseSection {
  uint32_t block = 0;
  // Gradient or weight, elements * size_of(dtype) bytes; in a push none where the gradient has come
  // as a part before it.
  std::span<const uint8_t> values;
};

struct TableSection {  // present (perhaps empty) iff this trainer has a gradient for the table
  uint32_t table = 0;
  std::span<const int64_t> keys;  // distinct
  std::span<const float> rows;    // keys.size() * dim
};

// What a trainer has read for batches to come.
struct PushHolds {
  // kRounds: these rows, all as they were after `since` updates or later. The reply brings those
  // that were updated after that.
  uint64_t since = 0;
  std::vector<PullTable> tables;
  // kOnArrival, with delay compensation: the prefetches that the gradient was computed on, in the
  // order of use, and the lowest that a later one may be.
  std::vector<uint64_t> used;
  uint64_t kept_from = 0;
};

struct PushView {
  PushHeader header;
  std::vector<DenseSection> blocks;
  std::vector<TableSection> tables;
  PushHolds holds;
};

// Dense gradients of the push of a round that is to come. Whether they are still what they were the
// push says: it has them again, names them without values, or does not name them.
struct PartView {
  uint64_t round = 0;
  std::vector<DenseSection> blocks;
};

// Reply to kPush, kCommit (blocks updated in the round; with trainer groups all; kOnArrival: all or
// none) and kPullDense (all).
struct DenseView {
  Version version;          // with one group `round` is also the number of its next round
  uint64_t cut_wanted = 0;  // number of the cut that waits for markers; 0: none
  std::vector<DenseSection> blocks;
  std::vector<TableSection> tables;  // to kPush and kCommit: held rows that were updated
};

// Reply to kPush of a set that exchanges deltas.
struct ChangesHeader {
  Version version;
  uint64_t cut_wanted = 0;  // as in a DenseView
  uint32_t members = 0;     // trainers that take part
  bool more = false;        // rows that did not fit: the next reply brings them
};
struct ChangesView {
  ChangesHeader header;
  std::vector<DenseSection> blocks;  // all of the server
  std::vector<TableSection> tables;  // rows that others changed since the trainer's last reply
};

struct FilledPush {
  Buffer payload;
  std::vector<uint8_t*> blocks;
  std::vector<int64_t*> keys;
  std::vector<float*> rows;
  std::vector<int64_t*> held;  // by table of the holds
};
struct HoldRefs {
  uint64_t since = 0;
  uint64_t kept_from = 0;
  std::vector<TableRef> tables;
  std::span<const uint64_t> used;
};

FilledPush layout_push(const PushHeader& header, std::span<const BlockRef> blocks,
                       std::span<const TableRef> tables, const Pool& pool,
                       const HoldRefs* holds = nullptr);
FilledPush layout_part(uint64_t round, std::span<const BlockRef> blocks, const Pool& pool);
FilledPush layout_dense(Version version, std::span<const BlockRef> blocks, const Pool& pool,
                        std::span<const TableRef> tables = {}, uint64_t cut_wanted = 0);
FilledPush layout_changes(const ChangesHeader& header, std::span<const BlockRef> blocks,
                          std::span<const TableRef> tables, const Pool& pool);

PushView decode_push(std::span<const uint8_t> payload, const ParamSetLayout& layout);
PartView decode_part(std::span<const uint8_t> payload, const ParamSetLayout& layout);
DenseView decode_dense(std::span<const uint8_t> payload, const ParamSetLayout& layout);
ChangesView decode_changes(std::span<const uint8_t> payload, const ParamSetLayout& layout);

}  // namespace cpudist::wire
