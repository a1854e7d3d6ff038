// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a client knows of one open parameter set, and how a step is packed into one payload per
// server and its answers are taken apart.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "client/client.h"
#include "client/coding.h"
#include "client/link.h"
#include "client/prefetch.h"
#include "client/row_cache.h"
#include "wire/messages.h"

namespace cpudist::client {

// Scratch memory of one table while a push is packed; kept between steps.
struct PackedTable {
  const TableGradient* gradient = nullptr;
  std::vector<int64_t> unique;
  std::vector<uint32_t> inverse;
  std::vector<float*> destinations;
};

class GeoExchange;
class PushQueue;

struct ClientSet {
  ClientSet(uint32_t id, const wire::ParamSetLayout& layout, std::span<const uint16_t> owners,
            uint32_t server_count);

  uint32_t id;
  wire::ParamSetLayout layout;
  uint32_t server_count;
  uint32_t parameter_count = 0;
  std::vector<std::unique_ptr<TableCache>> tables;
  std::vector<std::vector<uint32_t>> shard_blocks;      // per server, blocks in order
  std::vector<std::vector<uint32_t>> parameter_blocks;  // per parameter, blocks in order

  // Changed by sequenced operations only; `member` is read by pulls of other threads.
  std::atomic<bool> member{false};
  uint64_t round = 0;
  bool ready = false;  // the servers had all values when it was opened
  // The gradient that values are being read for, counted from 1. Updates on arrival.
  std::atomic<uint64_t> step{1};
  std::atomic<bool> dense_stale{false};  // a round was applied whose blocks were not taken in

  std::vector<RequestPtr> refused;  // the last push, if a server refused it
  // Updates on arrival; holds this set, released by close. Under the mutex of the client's sets.
  std::shared_ptr<PushQueue> queue;
  // Of trainers that step by themselves; the training thread's, released by close.
  std::shared_ptr<GeoExchange> exchange;

  // What lossy pushes of gradients hold back; whose thread sends pushes. Null if nothing.
  std::unique_ptr<Residues> residues;

  Prefetcher prefetcher;

  // Scratch of push, used by one sequenced operation at a time.
  std::vector<PackedTable> packed;

  TableCache& table(uint32_t index);
  const std::vector<uint32_t>& blocks_of(uint32_t parameter) const;
  uint64_t block_bytes(uint32_t block) const;
  wire::TableRef ref_of(uint32_t table, uint64_t rows) const;
  uint64_t block_state_elements(uint32_t block) const;
  uint32_t row_state_elements(uint32_t table) const;
  void invalidate_tables();
  // Throws kInvalidArgument for too few addresses of dense parameters.
  void check_weights(std::span<void* const> weights) const;
  // What a pull tells the servers: the gradient that it reads for, if they are to remember.
  uint64_t step_of_pull() const;

  // ---- what the next gradient is computed on, per server ----
  void note_dense(uint32_t server, wire::Version version);  // written to the weights
  wire::Version dense_version(uint32_t server) const;
  void note_rows(uint32_t server, wire::Version version);  // pulled
  // The oldest of both; forgets the rows. kAnyStaleness where nothing was read.
  std::vector<wire::Version> take_read();

 private:
  mutable std::mutex read_mutex_;
  std::vector<wire::Version> dense_read_;
  std::vector<wire::Version> rows_read_;
};
using ClientSetPtr = std::shared_ptr<ClientSet>;

// Checks a step and finds the distinct keys of its gradients. Throws kInvalidArgument,
// kRowOutOfRange, kUnpulledRow; only scratch memory was changed then.
void prepare_push(ClientSet& set, const StepPush& step);
// One payload per server of the step that was prepared last. Duplicate keys are summed in order.
// Updates on arrival: weight and clipping of the step are not in it.
// Rows are in the order of their keys if `ordered`, else in that of the gradient.
std::vector<Buffer> pack_push(ClientSet& set, const StepPush& step, const wire::Pool& pool,
                              bool want_dense = true, bool ordered = false);
// Rows pushed by the last pack_push, duplicates summed.
uint64_t packed_rows(const ClientSet& set);
// Writes the blocks of a dense reply; returns its version. No weights: the blocks are skipped.
wire::Version unpack_dense(const ClientSet& set, const wire::Frame& reply,
                           std::span<void* const> weights);

}  // namespace cpudist::client
