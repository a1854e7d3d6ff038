// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Remote tables on servers that are driven by hand: layouts, pushes of any rows, and whole groups
// of servers that are trained alike.
#pragma once

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "kernels/initial.h"
#include "support/failing_new.h"
#include "support/server_fixture.h"

namespace cpudist::testing {

inline constexpr uint32_t kRemoteRows = 64;

inline kernels::OptimizerConfig adagrad_of(double accumulator) {
  kernels::OptimizerConfig config;
  config.kind = kernels::OptimizerKind::kAdagrad;
  config.lr = 0.1;
  config.eps = 1e-10;
  config.initial_accumulator = accumulator;
  return config;
}

// small_layout(), its table remote: normal values, but for row 5, which is zero.
inline wire::ParamSetLayout remote_layout(kernels::OptimizerConfig config = sgd()) {
  wire::ParamSetLayout layout = small_layout(config);
  layout.tables[0].remote = true;
  layout.tables[0].seed = 9;
  layout.tables[0].initial = {{kernels::InitialOp::kNormal, 0.0, 0.5}};
  layout.tables[0].overrides = {{5, 6, 0.0}};
  return layout;
}

inline std::vector<float> begun_rows(const wire::TableSpec& table,
                                     const std::vector<int64_t>& keys) {
  std::vector<float> rows(keys.size() * table.dim);
  wire::initial_rows(table).fill(keys, table.dim, rows.data());
  return rows;
}

struct RowGradient {
  int64_t key;
  float value;  // of every element
};

// Of block "w" on the server that has it, and these rows of table 0.
inline Buffer remote_push(const World& world, wire::PushHeader header,
                          const std::vector<RowGradient>& rows) {
  header.configs = world.layout.configs;
  const wire::BlockRef block{0, 16, 0, 0};
  const size_t blocks = world.options.shard_id == 0 ? 1 : 0;
  const wire::TableRef table{0, rows.size(), world.layout.tables[0].dim, 0, false, 0};
  wire::FilledPush push =
      wire::layout_push(header, std::span(&block, blocks), std::span(&table, 1), nullptr);
  const std::vector<float> values(4, 0.5f);
  if (blocks == 1) std::memcpy(push.blocks[0], values.data(), 16);
  for (size_t i = 0; i < rows.size(); ++i) {
    push.keys[0][i] = rows[i].key;
    std::fill_n(push.rows[0] + i * table.dim, table.dim, rows[i].value);
  }
  return std::move(push.payload);
}

// Sends the first trainer's push, of which the nth allocation fails; whether there were so many.
inline bool push_without_memory(World& world, const Buffer& push, int64_t nth) {
  Buffer given = push.share();
  const FailingNew failing(nth);
  try {
    world[0].ask(wire::FrameKind::kPush, std::move(given));
  } catch (const std::exception&) {
    // told to the channel
  }
  return failing.happened();
}

inline std::vector<float> pulled_rows(Trainer& trainer, const wire::ParamSetLayout& layout,
                                      const std::vector<int64_t>& keys, uint64_t step = 0) {
  const wire::TableRef ref{0, keys.size(), layout.tables[0].dim, 0, false, 0};
  wire::FilledKeys pull = wire::layout_pull(std::span(&ref, 1), nullptr, step);
  std::copy(keys.begin(), keys.end(), pull.keys[0]);
  const wire::Frame frame =
      trainer.reply(trainer.plain(wire::FrameKind::kPullRows, 0, std::move(pull.payload)));
  wire::Version version;
  const auto rows = wire::decode_rows(view(frame.payload), std::span(&ref, 1), &version);
  return {rows[0].begin(), rows[0].end()};
}

// Weights, state, counts and steps of all blocks and of these rows, as a server tells them.
inline std::vector<uint8_t> fetched(World& world, const std::vector<int64_t>& keys) {
  wire::FetchRequest request;
  request.blocks = true;
  request.parameter = wire::kEveryParameter;
  request.table = 0;
  request.keys = keys;
  const wire::Frame frame =
      world[0].reply(world[0].plain(wire::FrameKind::kFetchState, 0, encode(request)));
  const auto bytes = view(frame.payload);
  return {bytes.begin(), bytes.end()};
}

// The blocks of this server, and `keys` of table 0 with what they would begin with.
inline Buffer store_begun(const World& world, const std::vector<int64_t>& keys) {
  const wire::BlockRef blocks[] = {{0, 16, 0, 0}, {1, 24, 0, 0}};
  const size_t count = world.options.shard_id == 0 ? 2 : 0;
  const wire::TableRef table{0, keys.size(), world.layout.tables[0].dim, 0, false, 0};
  wire::FilledStore store =
      wire::layout_store(std::span(blocks, count), std::span(&table, 1), nullptr);
  if (count > 0) {
    fill_block<float>(store.block_weights[0], 4);
    fill_block<double>(store.block_weights[1], 3);
  }
  std::copy(keys.begin(), keys.end(), store.keys[0]);
  const auto rows = begun_rows(remote_layout().tables[0], keys);
  std::copy(rows.begin(), rows.end(), store.weights[0]);
  return std::move(store.payload);
}

inline void make_ready(World& world, const std::vector<int64_t>& keys = {}) {
  world[0].reply(world[0].ask(wire::FrameKind::kStore, store_begun(world, keys)));
  for (auto& trainer : world.trainers) trainer->reply(trainer->ask(wire::FrameKind::kReady));
}

// Some servers, opened by all trainers, and made ready: the rows of tables that are not remote are
// stored with what those of remote ones begin with.
struct Servers {
  std::vector<std::unique_ptr<World>> worlds;

  Servers(const wire::ParamSetLayout& layout, uint32_t trainers, uint32_t servers,
          uint32_t threads) {
    for (uint32_t shard = 0; shard < servers; ++shard) {
      server::ServerOptions options = server_options(trainers, threads);
      options.shard_id = shard;
      options.server_count = servers;
      worlds.push_back(std::make_unique<World>(layout, options, false));
      World& world = *worlds.back();
      make_ready(world,
                 layout.tables[0].remote ? std::vector<int64_t>{} : keys_of(layout, options, 0));
    }
  }

  // The ids of the requests, by server.
  std::vector<uint64_t> push(size_t rank, const wire::PushHeader& header,
                             const std::vector<RowGradient>& rows) {
    std::vector<uint64_t> requests;
    for (auto& world : worlds) {
      const auto owned = keys_of(world->layout, world->options, 0);
      std::vector<RowGradient> share;
      for (const RowGradient& row : rows) {
        if (std::find(owned.begin(), owned.end(), row.key) != owned.end()) share.push_back(row);
      }
      requests.push_back(
          (*world)[rank].ask(wire::FrameKind::kPush, remote_push(*world, header, share)));
    }
    return requests;
  }
  // Sends the commits of a round that clips; `requests` are the pushes of each rank.
  void commit(uint64_t round, const std::vector<std::pair<size_t, std::vector<uint64_t>>>& pushed) {
    double total = 0;
    const auto& [first, requests] = pushed.front();
    for (size_t s = 0; s < worlds.size(); ++s) {
      const wire::Frame frame = (*worlds[s])[first].reply(requests[s]);
      total += wire::decode_push_norm(view(frame.payload)).squared_norms.at(0);
    }
    for (const auto& [rank, unused] : pushed) {
      for (auto& world : worlds) {
        (*world)[rank].ask(wire::FrameKind::kCommit,
                           encode(wire::Commit{round, {std::sqrt(total)}}));
      }
    }
  }
  std::vector<float> pull(size_t rank, const std::vector<int64_t>& keys, uint64_t step) {
    std::vector<float> rows;
    for (auto& world : worlds) {
      const auto owned = keys_of(world->layout, world->options, 0);
      std::vector<int64_t> share;
      for (const int64_t key : keys) {
        if (std::find(owned.begin(), owned.end(), key) != owned.end()) share.push_back(key);
      }
      const auto some = pulled_rows((*world)[rank], world->layout, share, step);
      rows.insert(rows.end(), some.begin(), some.end());
    }
    return rows;
  }
  std::vector<std::vector<uint8_t>> everything() {
    std::vector<std::vector<uint8_t>> found;
    for (auto& world : worlds) {
      found.push_back(fetched(*world, keys_of(world->layout, world->options, 0)));
    }
    return found;
  }
  uint64_t row_count() const {
    uint64_t rows = 0;
    for (const auto& world : worlds) rows += world->server.table_stats()[0].rows;
    return rows;
  }
  uint64_t created() const {
    uint64_t rows = 0;
    for (const auto& world : worlds) rows += world->server.table_stats()[0].created;
    return rows;
  }
};

}  // namespace cpudist::testing
