// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A request to store is done as a whole or not at all.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

server::ServerOptions first_of_two() {
  server::ServerOptions options = server_options(1);
  options.server_count = 2;
  return options;
}

// Block "w" of 99, and these rows of 99.
Buffer store_of(const wire::ParamSetLayout& layout, const std::vector<int64_t>& keys,
                size_t block_values) {
  const wire::BlockRef block{0, block_values * sizeof(float), 0, 0};
  const wire::TableRef table{0, keys.size(), layout.tables[0].dim, 0, false, 0};
  wire::FilledStore store = wire::layout_store(std::span(&block, 1), std::span(&table, 1), nullptr);
  const std::vector<float> values(std::max(block_values, keys.size() * table.dim), 99.0f);
  std::memcpy(store.block_weights[0], values.data(), block_values * sizeof(float));
  std::memcpy(store.keys[0], keys.data(), keys.size() * sizeof(int64_t));
  std::memcpy(store.weights[0], values.data(), keys.size() * table.dim * sizeof(float));
  return std::move(store.payload);
}

}  // namespace

TEST(store_with_a_row_of_another_server_changes_nothing) {
  World world(small_layout(), first_of_two());
  const auto own = keys_of(world.layout, world.options, 0);
  server::ServerOptions other = world.options;
  other.shard_id = 1;
  const auto foreign = keys_of(world.layout, other, 0);
  const auto block = world.block(0);
  const auto row = world.row(own[0]);
  const auto refused =
      world[0].ask(wire::FrameKind::kStore, store_of(world.layout, {own[0], foreign[0]}, 4));
  CHECK(contains(world[0].error(refused, ErrorCode::kInvalidArgument), "belongs to server 1"));
  CHECK(world.block(0) == block);
  CHECK(world.row(own[0]) == row);
  world[0].reply(world[0].ask(wire::FrameKind::kStore, store_of(world.layout, {own[0]}, 4)));
  CHECK(world.floats(0) == std::vector<float>(4, 99.0f));
  CHECK(world.row(own[0]) == std::vector<float>(4, 99.0f));
}

}  // namespace cpudist::testing
