// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/store.h"

namespace cpudist::table {

ParamStore make_store(const wire::ParamSetLayout& layout, uint32_t shard_id, uint32_t server_count,
                      const std::shared_ptr<MemoryAhead>& ahead,
                      const std::shared_ptr<MemoryCap>& cap) {
  ParamStore store;
  const Averaging averaging{layout.average_decay};
  store.averaging = averaging;
  for (uint32_t id = 0; id < layout.tables.size(); ++id) {
    const wire::TableSpec& spec = layout.tables[id];
    store.tables.push_back(std::make_unique<Table>(id, spec, layout.configs[spec.group], shard_id,
                                                   server_count, averaging, ahead, cap));
  }
  store.blocks.resize(layout.blocks.size());
  for (uint32_t id = 0; id < layout.blocks.size(); ++id) {
    const wire::BlockSpec& spec = layout.blocks[id];
    if (spec.shard != shard_id) continue;
    store.blocks[id] =
        std::make_unique<DenseBlock>(id, spec, layout.configs[spec.group], averaging, cap);
  }
  return store;
}

uint64_t planned_bytes(const ParamStore& store) {
  uint64_t total = 0;
  for (const auto& table : store.tables) total += table->planned_bytes();
  for (const auto& block : store.blocks) {
    if (block != nullptr) total += block->planned_bytes();
  }
  return total;
}

}  // namespace cpudist::table
