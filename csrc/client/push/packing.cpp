// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Gradients into payloads and payloads into weights, each value copied once.
#include "client/push/packing.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/errors.h"
#include "client/prefetch.h"
#include "client/state.h"
#include "kernels/dedupe.h"
#include "wire/codec/parts.h"

namespace cpudist::client {

void prepare_push(SetState& set, const StepPush& step) {
  if (step.configs.size() != set.layout.configs.size()) {
    throw Error(ErrorCode::kInvalidArgument, "push: " + std::to_string(step.configs.size()) +
                                                 " optimizer configurations, "
                                                 "expected one per group, " +
                                                 std::to_string(set.layout.configs.size()));
  }
  set.check_reads_values();
  set.check_weights(step.weights);
  set.packed.resize(set.tables.size());
  for (PackedTable& packed : set.packed) packed.gradient = nullptr;
  for (const TableGradient& gradient : step.tables) {
    TableCache& cache = set.table(gradient.table);
    PackedTable& packed = set.packed[gradient.table];
    if (packed.gradient != nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  "push: two gradients for table '" + cache.spec().name + "'");
    }
    if (gradient.count > std::numeric_limits<uint32_t>::max()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "push: a gradient of " + std::to_string(gradient.count) + " rows for table '" +
                      cache.spec().name + "', at most 2^32 - 1; step more often");
    }
    packed.gradient = &gradient;
    packed.unique.resize(gradient.count);
    packed.inverse.resize(gradient.count);
    const std::lock_guard lock(cache.mutex);
    packed.unique.resize(cache.take_pulled({gradient.keys, static_cast<size_t>(gradient.count)},
                                           packed.unique.data(), packed.inverse.data()));
  }
}

namespace {

struct DenseSource {
  uint32_t block;
  const uint8_t* gradient;
  uint64_t size_bytes;  // that go; none where all went early
};

// Per server, the blocks to send in increasing order.
std::vector<std::vector<DenseSource>> split_dense(SetState& set, const StepPush& step) {
  std::vector<std::vector<DenseSource>> shares(set.server_count);
  for (const ParameterGradient& parameter : step.parameters) {
    const auto* base = static_cast<const uint8_t*>(parameter.gradient);
    for (const uint32_t b : set.blocks_of(parameter.parameter)) {
      const wire::BlockSpec& block = set.layout.blocks[b];
      const std::span values(base + block.offset * size_of(block.dtype), set.block_bytes(b));
      const bool early = set.early.holds(b, set.round, values);
      shares[block.shard].push_back({b, values.data(), early ? 0 : values.size()});
    }
  }
  for (auto& share : shares) {
    std::sort(share.begin(), share.end(),
              [](const DenseSource& a, const DenseSource& b) { return a.block < b.block; });
  }
  return shares;
}

// Distinct keys to their owners; returns the tables with a gradient in increasing order.
std::vector<uint32_t> split_tables(SetState& set) {
  std::vector<uint32_t> present;
  for (uint32_t t = 0; t < set.packed.size(); ++t) {
    PackedTable& packed = set.packed[t];
    if (packed.gradient == nullptr) continue;
    packed.destinations.resize(packed.unique.size());
    set.table(t).split().run(packed.unique);
    present.push_back(t);
  }
  return present;
}

Buffer pack_server(SetState& set, uint32_t server, const wire::PushHeader& header,
                   std::span<const DenseSource> dense, std::span<const uint32_t> tables,
                   const wire::Pool& pool, const Prefetcher* prefetcher, bool ordered) {
  std::vector<wire::BlockRef> block_refs;
  for (const DenseSource& source : dense) {
    block_refs.push_back({source.block, source.size_bytes});
  }
  std::vector<wire::TableRef> table_refs;
  for (const uint32_t t : tables) {
    wire::TableRef ref;
    ref.table = t;
    ref.row_count = set.tables[t]->split().count(server);
    ref.dim = set.layout.tables[t].dim;
    table_refs.push_back(ref);
  }
  const wire::HoldRefs* holds = prefetcher == nullptr ? nullptr : prefetcher->holds(server);
  wire::FilledPush filled = wire::layout_push(header, block_refs, table_refs, pool, holds);
  for (size_t i = 0; i < filled.held.size(); ++i) {
    const auto held = prefetcher->held(holds->tables[i].table).of(server);
    std::copy(held.begin(), held.end(), filled.held[i]);
  }
  for (size_t i = 0; i < dense.size(); ++i) {
    std::memcpy(filled.blocks[i], dense[i].gradient, block_refs[i].size_bytes);
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    PackedTable& packed = set.packed[tables[i]];
    const auto positions = set.tables[tables[i]]->split().positions(server);
    const std::span<int64_t> keys(filled.keys[i], positions.size());
    for (size_t j = 0; j < keys.size(); ++j) keys[j] = packed.unique[positions[j]];
    std::vector<uint32_t> order;
    if (ordered) order = wire::order_of(keys);
    for (size_t j = 0; j < keys.size(); ++j) {
      const uint32_t position = positions[ordered ? order[j] : j];
      keys[j] = packed.unique[position];
      packed.destinations[position] = filled.rows[i] + j * table_refs[i].dim;
    }
  }
  return std::move(filled.payload);
}

}  // namespace

std::vector<Buffer> pack_push(SetState& set, const StepPush& step, const wire::Pool& pool,
                              const Prefetcher* prefetcher, bool want_dense, bool ordered) {
  wire::PushHeader header;
  header.round = set.round;
  const bool on_arrival = set.layout.mode == wire::UpdateMode::kOnArrival;
  if (on_arrival) header.step = set.step;
  header.samples = step.samples;
  header.want_dense = want_dense;
  if (!on_arrival) {
    header.weight = step.weight;
    header.by_samples = step.by_samples;
    header.clip_value = step.clip_value;
    header.clip_norm = step.clip_norm;
    header.clip_each = step.clip_each;
  }
  header.configs = step.configs;
  // The split of a table is shared with its pulls.
  std::vector<std::unique_lock<std::mutex>> locks;
  for (const auto& cache : set.tables) locks.emplace_back(cache->mutex);
  const auto dense = split_dense(set, step);
  const auto tables = split_tables(set);
  std::vector<Buffer> payloads;
  for (uint32_t s = 0; s < set.server_count; ++s) {
    if (on_arrival) header.round = set.dense_version(s).round;
    payloads.push_back(pack_server(set, s, header, dense[s], tables, pool, prefetcher, ordered));
  }
  for (const uint32_t t : tables) {
    const PackedTable& packed = set.packed[t];
    const size_t dim = set.layout.tables[t].dim;
    kernels::segment_sum_to(packed.gradient->rows, dim, packed.gradient->count, dim,
                            packed.inverse.data(), packed.destinations.data());
  }
  return payloads;
}

uint64_t packed_rows(const SetState& set) {
  uint64_t rows = 0;
  for (const PackedTable& packed : set.packed) {
    if (packed.gradient != nullptr) rows += packed.unique.size();
  }
  return rows;
}

wire::Version unpack_dense(const SetState& set, const wire::Frame& reply,
                           std::span<void* const> weights, uint64_t* cut_wanted) {
  const wire::DenseView view = wire::decode_dense(reply.payload.bytes(), set.layout);
  if (cut_wanted != nullptr) *cut_wanted = std::max(*cut_wanted, view.cut_wanted);
  if (weights.empty()) return view.version;
  for (const wire::DenseSection& section : view.blocks) {
    const wire::BlockSpec& block = set.layout.blocks[section.block];
    auto* base = static_cast<uint8_t*>(weights[block.parameter]);
    std::memcpy(base + block.offset * size_of(block.dtype), section.values.data(),
                section.values.size());
  }
  return view.version;
}

}  // namespace cpudist::client
