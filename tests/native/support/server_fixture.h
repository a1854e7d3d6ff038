// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Drives a Server by hand: connections that record what the server sends, and trainers that number
// their requests. Nothing here runs a thread, so the order of requests is the test's.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/hash.h"
#include "server/server.h"
#include "support/check.h"
#include "support/fake_connection.h"
#include "support/patience.h"
#include "table/store.h"
#include "wire/control.h"
#include "wire/push.h"

namespace cpudist::testing {

using namespace cpudist;  // NOLINT: test vocabulary

inline constexpr uint64_t kRunId = 77;

inline std::span<const uint8_t> view(const Buffer& payload) {
  return {payload.data(), payload.size()};
}

class Trainer {
 public:
  Trainer(server::Server& server, uint32_t rank, uint32_t incarnation = 1)
      : server_(server), rank_(rank), incarnation_(incarnation) {
    reconnect();
  }

  void reconnect() {
    connection_ = std::make_shared<FakeConnection>("fake:" + std::to_string(rank_));
    server_.on_open(connection_);
  }
  void disconnect() { server_.on_close(connection_, "test"); }

  uint64_t hello(uint32_t trainers, uint32_t servers, uint32_t shard = 0,
                 const std::string& host = "host-a pid 12") {
    wire::Hello hello;
    hello.trainer_count = trainers;
    hello.server_count = servers;
    hello.shard_id = shard;
    hello.host = host;
    return plain(wire::FrameKind::kHello, wire::kNoParamSet, encode(hello));
  }
  // An unsequenced request; returns its id.
  uint64_t plain(wire::FrameKind kind, uint32_t param_set, Buffer payload, uint64_t sequence = 0) {
    deliver(header(kind, param_set, ++request_, sequence), std::move(payload));
    return request_;
  }
  // The next sequenced request; returns its id.
  uint64_t ask(wire::FrameKind kind, Buffer payload = Buffer(), uint32_t param_set = 0) {
    const uint64_t request = begin(kind, std::move(payload), param_set);
    // Another thread answers what waits for a disk.
    if (kind == wire::FrameKind::kLoad) CHECK(comes(request));
    return request;
  }
  uint64_t begin(wire::FrameKind kind, Buffer payload = Buffer(), uint32_t param_set = 0) {
    return plain(kind, param_set, std::move(payload), ++sequence_);
  }
  void deliver(const wire::FrameHeader& header, Buffer payload) {
    server_.on_frame(connection_, wire::Frame{header, std::move(payload)});
  }
  wire::FrameHeader header(wire::FrameKind kind, uint32_t param_set, uint64_t request,
                           uint64_t sequence) const {
    wire::FrameHeader header;
    header.kind = kind;
    header.run_id = kRunId;
    header.incarnation = incarnation_;
    header.rank = static_cast<uint16_t>(rank_);
    header.param_set = param_set;
    header.request_id = request;
    header.sequence = sequence;
    return header;
  }

  // Whether an answer comes.
  bool comes(uint64_t request) const {
    return connection_->wait_for_answer(request, Clock::now() + kPatience);
  }
  bool closes() const { return connection_->wait_for_close(Clock::now() + kPatience); }
  // Who has sent the last frame.
  std::thread::id sender() const { return connection_->sender(); }
  bool waits(uint64_t request) const { return connection_->answers(request).empty(); }
  wire::Frame answer(uint64_t request) const {
    auto found = connection_->answers(request);
    if (found.empty()) fail(__FILE__, __LINE__, "no answer to request " + std::to_string(request));
    return std::move(found.back());
  }
  wire::Frame reply(uint64_t request, wire::FrameKind kind = wire::FrameKind::kReply) const {
    wire::Frame frame = answer(request);
    if (frame.header.kind == wire::FrameKind::kError) {
      fail(__FILE__, __LINE__,
           "error instead of a reply: " + wire::decode_error(view(frame.payload)).message);
    }
    CHECK_EQ(frame.header.kind, kind);
    return frame;
  }
  uint64_t round_of(uint64_t request) const {
    return wire::decode_round_reply(view(reply(request).payload)).round;
  }
  // The message of an error answer with this code.
  std::string error(uint64_t request, ErrorCode code) const {
    const wire::Frame frame = answer(request);
    CHECK_EQ(frame.header.kind, wire::FrameKind::kError);
    const wire::ErrorReply reply = wire::decode_error(view(frame.payload));
    CHECK_EQ(reply.code, code);
    return reply.message;
  }

  uint32_t rank() const { return rank_; }
  uint64_t sequence() const { return sequence_; }
  uint64_t next_request() { return ++request_; }
  void take_back() { --sequence_; }  // the last request was not recorded
  const std::shared_ptr<FakeConnection>& connection() const { return connection_; }

 private:
  server::Server& server_;
  uint32_t rank_;
  uint32_t incarnation_;
  std::shared_ptr<FakeConnection> connection_;
  uint64_t request_ = 0;
  uint64_t sequence_ = 0;
};

inline uint64_t join(Trainer& trainer, wire::JoinStep step, uint64_t round = 0) {
  return trainer.ask(wire::FrameKind::kJoin, encode(wire::Join{step, round}));
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline kernels::OptimizerConfig sgd(double lr = 1.0) {
  kernels::OptimizerConfig config;
  config.lr = lr;
  return config;
}

// Table "emb" of 64 rows of 4, float32 block "w" of 4, float64 block "d" of 3; blocks on server 0.
inline wire::ParamSetLayout small_layout(kernels::OptimizerConfig config = sgd()) {
  wire::ParamSetLayout layout;
  layout.configs = {config};
  layout.tables.push_back({"emb", 64, 4, 0});
  wire::BlockSpec w;
  w.name = "w";
  w.elements = 4;
  wire::BlockSpec d;
  d.name = "d";
  d.elements = 3;
  d.dtype = wire::DType::kFloat64;
  d.parameter = 1;
  layout.blocks = {w, d};
  return layout;
}

inline wire::ParamSetLayout on_arrival(uint64_t max_staleness = wire::kAnyStaleness) {
  wire::ParamSetLayout layout = small_layout();
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.max_staleness = max_staleness;
  return layout;
}

inline server::ServerOptions server_options(uint32_t trainers, uint32_t threads = 1) {
  server::ServerOptions options;
  options.run_id = kRunId;
  options.trainer_count = trainers;
  options.threads = threads;
  options.host = "host-s pid 1";
  return options;
}

// What a server keeps for a layout before there are rows of remote tables.
inline uint64_t values_bytes(const wire::ParamSetLayout& layout,
                             const server::ServerOptions& options) {
  return planned_bytes(
      table::make_store(layout, options.shard_id, options.server_count, nullptr, nullptr));
}

inline std::vector<int64_t> keys_of(const wire::ParamSetLayout& layout,
                                    const server::ServerOptions& options, uint32_t table) {
  std::vector<int64_t> keys;
  for (uint64_t key = 0; key < layout.tables[table].rows; ++key) {
    const uint32_t bucket = kernels::bucket_of(static_cast<int64_t>(key),
                                               kernels::table_salt(layout.tables[table].name));
    if (wire::owner_of_bucket(bucket, options.server_count) == options.shard_id) {
      keys.push_back(static_cast<int64_t>(key));
    }
  }
  return keys;
}

inline float initial_weight(int64_t key, size_t column) {
  return static_cast<float>(key) + 0.25f * static_cast<float>(column);
}

template <typename T>
void fill_block(uint8_t* target, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    const T value = static_cast<T>(i) + T(10);
    std::memcpy(target + i * sizeof(T), &value, sizeof(T));
  }
}

// Everything server `options` owns, without state and counts. Blocks hold 10, 11, ...
inline Buffer store_all(const wire::ParamSetLayout& layout, const server::ServerOptions& options) {
  std::vector<wire::BlockRef> blocks;
  for (uint32_t id = 0; id < layout.blocks.size(); ++id) {
    const wire::BlockSpec& spec = layout.blocks[id];
    if (spec.shard == options.shard_id)
      blocks.push_back({id, spec.elements * size_of(spec.dtype), 0, 0});
  }
  std::vector<wire::TableRef> tables;
  std::vector<std::vector<int64_t>> keys;
  for (uint32_t id = 0; id < layout.tables.size(); ++id) {
    keys.push_back(keys_of(layout, options, id));
    tables.push_back({id, keys.back().size(), layout.tables[id].dim, 0, false, 0});
  }
  wire::FilledStore store = wire::layout_store(blocks, tables, nullptr);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const wire::BlockSpec& spec = layout.blocks[blocks[i].block];
    if (spec.dtype == wire::DType::kFloat64) {
      fill_block<double>(store.block_weights[i], spec.elements);
    } else {
      fill_block<float>(store.block_weights[i], spec.elements);
    }
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    for (size_t row = 0; row < keys[i].size(); ++row) {
      store.keys[i][row] = keys[i][row];
      for (size_t c = 0; c < tables[i].dim; ++c) {
        store.weights[i][row * tables[i].dim + c] = initial_weight(keys[i][row], c);
      }
    }
  }
  return std::move(store.payload);
}

struct PushSpec {
  uint64_t round = 0;
  double weight = 1.0;
  double clip_value = 0.0;
  double clip_norm = 0.0;
  bool clip_each = false;
  std::vector<kernels::OptimizerConfig> configs = {sgd()};
  std::map<uint32_t, std::vector<double>> blocks;  // values of a gradient
  std::map<uint32_t, std::vector<std::pair<int64_t, float>>>
      tables;  // a row of equal values per key
};

inline Buffer make_push(const wire::ParamSetLayout& layout, const PushSpec& spec) {
  wire::PushHeader header;
  header.round = spec.round;
  header.weight = spec.weight;
  header.clip_value = spec.clip_value;
  header.clip_norm = spec.clip_norm;
  header.clip_each = spec.clip_each;
  header.configs = spec.configs;
  std::vector<wire::BlockRef> blocks;
  for (const auto& [id, values] : spec.blocks) {
    blocks.push_back({id, values.size() * size_of(layout.blocks[id].dtype), 0, 0});
  }
  std::vector<wire::TableRef> tables;
  for (const auto& [id, rows] : spec.tables) {
    tables.push_back({id, rows.size(), layout.tables[id].dim, 0, false, 0});
  }
  wire::FilledPush push = wire::layout_push(header, blocks, tables, nullptr);
  size_t at = 0;
  for (const auto& [id, values] : spec.blocks) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (layout.blocks[id].dtype == wire::DType::kFloat64) {
        std::memcpy(push.blocks[at] + i * 8, &values[i], 8);
      } else {
        const auto value = static_cast<float>(values[i]);
        std::memcpy(push.blocks[at] + i * 4, &value, 4);
      }
    }
    ++at;
  }
  at = 0;
  for (const auto& [id, rows] : spec.tables) {
    const size_t dim = layout.tables[id].dim;
    for (size_t i = 0; i < rows.size(); ++i) {
      push.keys[at][i] = rows[i].first;
      for (size_t c = 0; c < dim; ++c) push.rows[at][i * dim + c] = rows[i].second;
    }
    ++at;
  }
  return std::move(push.payload);
}

// One server with its trainers, opened, stored and ready.
struct World {
  wire::ParamSetLayout layout;
  server::ServerOptions options;
  server::Server server;
  std::vector<std::unique_ptr<Trainer>> trainers;

  World(wire::ParamSetLayout given, server::ServerOptions chosen, bool make_ready = true)
      : layout(std::move(given)), options(chosen), server(chosen) {
    for (uint32_t rank = 0; rank < options.trainer_count; ++rank) {
      trainers.push_back(std::make_unique<Trainer>(server, rank));
      Trainer& trainer = *trainers.back();
      trainer.reply(trainer.hello(options.trainer_count, options.server_count, options.shard_id),
                    wire::FrameKind::kHello);
      trainer.reply(trainer.ask(wire::FrameKind::kOpen, encode(layout)));
    }
    if (!make_ready) return;
    Trainer& first = *trainers[0];
    first.reply(first.ask(wire::FrameKind::kStore, store_all(layout, options)));
    for (auto& trainer : trainers) trainer->reply(trainer->ask(wire::FrameKind::kReady));
  }
  explicit World(uint32_t count, uint32_t threads = 1)
      : World(small_layout(), server_options(count, threads)) {}

  Trainer& operator[](size_t rank) { return *trainers[rank]; }
  uint64_t push(size_t rank, const PushSpec& spec) {
    return trainers[rank]->ask(wire::FrameKind::kPush, make_push(layout, spec));
  }
  wire::DenseView dense(const wire::Frame& frame) const {
    return wire::decode_dense(view(frame.payload), layout);
  }

  // The row of `key` as the server holds it.
  std::vector<float> row(int64_t key, uint32_t table = 0) {
    const wire::TableRef ref{table, 1, layout.tables[table].dim, 0, false, 0};
    wire::FilledKeys pull = wire::layout_pull(std::span(&ref, 1), nullptr);
    pull.keys[0][0] = key;
    Trainer& asker = *trainers[0];
    const wire::Frame frame =
        asker.reply(asker.plain(wire::FrameKind::kPullRows, 0, std::move(pull.payload)));
    wire::Version version;
    const auto rows = wire::decode_rows(view(frame.payload), std::span(&ref, 1), &version);
    return {rows[0].begin(), rows[0].end()};
  }
  std::vector<uint8_t> block(uint32_t id) {
    Trainer& asker = *trainers[0];
    const wire::Frame frame = asker.reply(asker.plain(wire::FrameKind::kPullDense, 0, Buffer()));
    for (const wire::DenseSection& section : dense(frame).blocks) {
      if (section.block == id) return {section.values.begin(), section.values.end()};
    }
    fail(__FILE__, __LINE__, "no block " + std::to_string(id));
  }
  std::vector<float> floats(uint32_t id) {
    const auto bytes = block(id);
    std::vector<float> values(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  std::vector<double> doubles(uint32_t id) {
    const auto bytes = block(id);
    std::vector<double> values(bytes.size() / 8);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
};

}  // namespace cpudist::testing
