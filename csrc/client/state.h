// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a client knows of one open parameter set: its layout, which rows and values are here, and
// what they were read as.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "client/cache/budget.h"
#include "client/links/link.h"
#include "client/push/early.h"
#include "client/push/residues.h"
#include "client/push/step.h"
#include "client/row_cache.h"
#include "client/values/passing_rows.h"
#include "wire/messages.h"

namespace cpudist::client {

// What travels at once to or from a server where a whole table or parameter does.
inline constexpr uint64_t kChunkBytes = 8ull << 20;

// Scratch memory of one table while a push is packed; kept between steps.
struct PackedTable {
  const TableGradient* gradient = nullptr;
  std::vector<int64_t> unique;
  std::vector<uint32_t> inverse;
  std::vector<float*> destinations;
};

struct SetState {
  SetState(uint32_t id, const wire::ParamSetLayout& layout, std::span<const uint16_t> owners,
           uint32_t server_count, const CacheLimits& limits = {});

  uint32_t id;
  wire::ParamSetLayout layout;
  uint32_t server_count;
  uint32_t parameter_count = 0;
  CacheBudget cache_budget;  // of remote tables
  std::vector<std::unique_ptr<TableCache>> tables;
  std::vector<std::vector<uint32_t>> shard_blocks;      // per server, blocks in order
  std::vector<std::vector<uint32_t>> parameter_blocks;  // per parameter, blocks in order

  // Changed by sequenced operations only; `member` is read by pulls of other threads.
  std::atomic<bool> member{false};
  uint64_t round = 0;
  std::atomic<bool> closed{false};  // the servers have been told
  bool ready = false;               // the servers had all values when it was opened
  // The gradient that values are being read for, counted from 1. Updates on arrival.
  std::atomic<uint64_t> step{1};
  // Pulls bring the averages that the servers keep: for no gradient.
  std::atomic<bool> reads_averages{false};
  std::atomic<bool> dense_stale{false};  // a round was applied whose blocks were not taken in

  // The cut that the last replies to pushes ask this trainer's marker for; 0: none.
  std::atomic<uint64_t> cut_wanted{0};

  EarlyGradients early;
  std::vector<RequestPtr> refused;  // the last push, if a server refused it
  // What lossy pushes of gradients hold back; whose thread sends pushes. Null if nothing.
  std::unique_ptr<Residues> residues;
  std::atomic<uint64_t> residues_dropped{0};  // rows

  SharedPassingRows passing;

  // Scratch of push, used by one sequenced operation at a time.
  std::vector<PackedTable> packed;

  TableCache& table(uint32_t index);
  // Dense parameters and tables.
  size_t tensor_count() const { return parameter_count + tables.size(); }
  const std::vector<uint32_t>& blocks_of(uint32_t parameter) const;
  uint64_t block_bytes(uint32_t block) const;
  wire::TableRef ref_of(uint32_t table, uint64_t rows) const;
  uint64_t block_state_elements(uint32_t block) const;
  uint32_t row_state_elements(uint32_t table) const;
  void invalidate_tables();
  // It is closed: gives the memory back that grows with tables. Nobody sends pushes any more.
  void release();
  // Throws kInvalidArgument while averages are in the place of values.
  void check_reads_values() const;
  // Throws kInvalidArgument for too few addresses of dense parameters.
  void check_weights(std::span<void* const> weights) const;
  // What a pull tells the servers: the gradient that it reads for, if they are to remember, or that
  // it reads averages.
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

}  // namespace cpudist::client
