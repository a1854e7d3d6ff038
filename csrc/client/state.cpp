// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/state.h"

#include <algorithm>
#include <string>

#include "base/errors.h"
#include "kernels/hash.h"

namespace cpudist::client {

SetState::SetState(uint32_t set_id, const wire::ParamSetLayout& set_layout,
                   std::span<const uint16_t> owners, uint32_t servers, const CacheLimits& limits)
    : id(set_id),
      layout(set_layout),
      server_count(servers),
      parameter_count(wire::parameter_count(layout)),
      cache_budget(limits.cache_bytes),
      shard_blocks(servers),
      dense_read_(servers),
      rows_read_(servers, wire::Version(wire::kAnyStaleness)) {
  for (uint32_t t = 0; t < layout.tables.size(); ++t) {
    const wire::TableSpec& spec = layout.tables[t];
    tables.push_back(std::make_unique<TableCache>(spec, kernels::table_salt(spec.name), owners,
                                                  server_count, &cache_budget));
  }
  for (uint32_t b = 0; b < layout.blocks.size(); ++b) {
    const wire::BlockSpec& block = layout.blocks[b];
    if (block.shard >= server_count) {
      throw Error(ErrorCode::kInvalidArgument,
                  "block '" + block.name + "': shard " + std::to_string(block.shard) +
                      " is not below the number of servers, " + std::to_string(server_count));
    }
    shard_blocks[block.shard].push_back(b);
  }
  parameter_blocks.resize(parameter_count);
  for (uint32_t b = 0; b < layout.blocks.size(); ++b) {
    parameter_blocks[layout.blocks[b].parameter].push_back(b);
  }
  if (rounds_gradients(layout)) residues = std::make_unique<Residues>(layout, limits.residue_bytes);
}

TableCache& SetState::table(uint32_t index) {
  if (index >= tables.size()) {
    throw Error(ErrorCode::kInvalidArgument, "table " + std::to_string(index) +
                                                 " of parameter set " + std::to_string(id) +
                                                 ", which has " + std::to_string(tables.size()));
  }
  return *tables[index];
}

const std::vector<uint32_t>& SetState::blocks_of(uint32_t parameter) const {
  // A parameter without elements has no block and may have the highest index.
  static const std::vector<uint32_t> kNone;
  return parameter < parameter_blocks.size() ? parameter_blocks[parameter] : kNone;
}

uint64_t SetState::block_bytes(uint32_t block) const {
  const wire::BlockSpec& spec = layout.blocks[block];
  return spec.elements * size_of(spec.dtype);
}

wire::TableRef SetState::ref_of(uint32_t index, uint64_t rows) const {
  wire::TableRef ref;
  ref.table = index;
  ref.row_count = rows;
  ref.dim = layout.tables[index].dim;
  return ref;
}

uint64_t SetState::block_state_elements(uint32_t block) const {
  const wire::BlockSpec& spec = layout.blocks[block];
  return kernels::state_elements(layout.configs.at(spec.group), spec.elements, spec.row_width);
}

uint32_t SetState::row_state_elements(uint32_t index) const {
  const wire::TableSpec& spec = layout.tables[index];
  return static_cast<uint32_t>(
      kernels::state_elements(layout.configs.at(spec.group), spec.dim, spec.dim));
}

uint64_t SetState::step_of_pull() const {
  if (reads_averages) return wire::kAverages;
  const bool compensated = layout.compensation.kind != wire::Compensation::kNone;
  return compensated && member ? step.load() : 0;
}

void SetState::invalidate_tables() {
  for (const auto& cache : tables) {
    const std::lock_guard lock(cache->mutex);
    cache->invalidate();
  }
}

void SetState::release() {
  for (const auto& cache : tables) {
    const std::lock_guard lock(cache->mutex);
    cache->release();
  }
  {
    const std::lock_guard lock(passing.mutex);
    passing.rows = {};
  }
  residues.reset();
}

void SetState::check_reads_values() const {
  if (!reads_averages) return;
  throw Error(ErrorCode::kInvalidArgument,
              "the model has the averages of its parameters: step, store and load outside of "
              "opt.averaged()");
}

void SetState::check_weights(std::span<void* const> weights) const {
  if (weights.size() >= parameter_count) return;
  throw Error(ErrorCode::kInvalidArgument, "addresses of " + std::to_string(weights.size()) +
                                               " dense parameters, expected " +
                                               std::to_string(parameter_count));
}

// ---- what the next gradient is computed on ------------------------------------------------------

void SetState::note_dense(uint32_t server, wire::Version version) {
  const std::lock_guard lock(read_mutex_);
  dense_read_[server] = version;
}

wire::Version SetState::dense_version(uint32_t server) const {
  const std::lock_guard lock(read_mutex_);
  return dense_read_[server];
}

void SetState::note_rows(uint32_t server, wire::Version version) {
  const std::lock_guard lock(read_mutex_);
  if (version.round < rows_read_[server].round) rows_read_[server] = version;
}

std::vector<wire::Version> SetState::take_read() {
  const std::lock_guard lock(read_mutex_);
  std::vector<wire::Version> oldest = rows_read_;
  for (uint32_t s = 0; s < server_count; ++s) {
    if (!shard_blocks[s].empty() && dense_read_[s].round < oldest[s].round) {
      oldest[s] = dense_read_[s];
    }
    rows_read_[s] = wire::Version(wire::kAnyStaleness);
  }
  return oldest;
}

}  // namespace cpudist::client
