// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a client knows of one open parameter set, and how a step is packed into one payload per
// server and its answers are taken apart.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/client.h"
#include "core/client_link.h"
#include "core/client_rows.h"
#include "core/messages.h"

namespace cpudist::core {

// Scratch memory of one table while a push is packed; kept between steps.
struct PackedTable {
  const TableGradient* gradient = nullptr;
  std::vector<int64_t> unique;
  std::vector<uint32_t> inverse;
  std::vector<float*> destinations;
};

struct ClientSet {
  ClientSet(uint32_t id, const ParamSetLayout& layout, std::span<const uint16_t> owners,
            uint32_t server_count);

  uint32_t id;
  ParamSetLayout layout;
  uint32_t server_count;
  uint32_t parameter_count = 0;
  std::vector<std::unique_ptr<TableCache>> tables;
  std::vector<std::vector<uint32_t>> shard_blocks;      // per server, blocks in order
  std::vector<std::vector<uint32_t>> parameter_blocks;  // per parameter, blocks in order

  // Changed by sequenced operations only; `member` is read by pulls of other threads.
  std::atomic<bool> member{false};
  uint64_t round = 0;
  std::atomic<bool> dense_stale{false};  // a round was applied whose blocks were not taken in

  std::vector<RequestPtr> refused;  // the last push, if a server refused it

  // Scratch of push, used by one sequenced operation at a time.
  std::vector<PackedTable> packed;

  TableCache& table(uint32_t index);
  const std::vector<uint32_t>& blocks_of(uint32_t parameter) const;
  uint64_t block_bytes(uint32_t block) const;
  uint64_t block_state_elements(uint32_t block) const;
  uint32_t row_state_elements(uint32_t table) const;
  void invalidate_tables();
};

// Checks a step and finds the distinct keys of its gradients. Throws kInvalidArgument,
// kRowOutOfRange, kUnpulledRow; only scratch memory was changed then.
void prepare_push(ClientSet& set, const StepPush& step);
// One payload per server of the step that was prepared last. Duplicate keys are summed in order.
std::vector<Buffer> pack_push(ClientSet& set, const StepPush& step, const Pool& pool);
// Rows pushed by the last pack_push, duplicates summed.
uint64_t packed_rows(const ClientSet& set);
// Writes the blocks of a dense reply; returns its round. No weights: the blocks are skipped.
uint64_t unpack_dense(const ClientSet& set, const Frame& reply, std::span<void* const> weights);

}  // namespace cpudist::core
