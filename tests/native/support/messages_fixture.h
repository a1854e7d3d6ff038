// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One valid payload of every kind, and the decoder that reads it.

#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "wire/control.h"
#include "wire/cut.h"
#include "wire/handshake/handshake.h"
#include "wire/layout.h"
#include "wire/push.h"
#include "wire/rows.h"
#include "wire/runs.h"
#include "wire/snapshot/load.h"

namespace cpudist::testing {

inline std::span<const uint8_t> view_of(const Buffer& buffer) {
  return {buffer.data(), buffer.size()};
}

inline kernels::OptimizerConfig adagrad(double lr) {
  kernels::OptimizerConfig config;
  config.kind = kernels::OptimizerKind::kAdagrad;
  config.lr = lr;
  config.eps = 1e-10;
  return config;
}

inline wire::ParamSetLayout sample_layout() {
  wire::ParamSetLayout layout;
  layout.configs = {adagrad(0.1), adagrad(0.2)};
  layout.tables = {{"users", 100, 3, 0}, {"items", 1ull << 40, 2, 1}, {"words", 7, 1, 0}};
  layout.blocks = {{"bias", 5, wire::DType::kFloat32, 0, 0, 0, 0, 1},
                   {"weight.block0", 6, wire::DType::kFloat64, 1, 1, 1, 0, 3},
                   {"weight.block1", 3, wire::DType::kFloat64, 0, 1, 1, 6, 3},
                   {"nothing", 0, wire::DType::kFloat32, 0, 0, 2, 0, 1}};
  return layout;
}

// Every step of an initial program, over two of which the first draw does not count.
inline wire::ParamSetLayout sample_remote_layout() {
  using Op = kernels::InitialOp;
  wire::ParamSetLayout layout = sample_layout();
  layout.tables[1].remote = true;
  layout.tables[1].seed = 0xfedcba9876543210;
  layout.tables[1].initial = {{Op::kNormal, 1, 2}, {Op::kUniform, -1, 1}, {Op::kErfinv, 0, 0},
                              {Op::kMul, 0.25, 0}, {Op::kAdd, 3, 0},      {Op::kClamp, 2, 4}};
  layout.tables[1].overrides = {{0, 1, 0}, {7, 1ull << 40, -2.5}};
  layout.tables[2].remote = true;
  layout.tables[2].initial = {{Op::kFill, 0.5, 0}};
  layout.average_decay = 0.75;
  return layout;
}

// Everything that only remote tables have.
inline wire::ParamSetLayout sample_open_layout() {
  wire::ParamSetLayout layout = sample_remote_layout();
  layout.tables[1].open = true;
  layout.tables[1].unknown_zeros = true;
  layout.tables[1].max_rows = 1000;
  layout.tables[1].overrides = {{~0ull, 0, 0}};
  layout.tables[1].admission = {wire::AdmissionKind::kCount, 3, 1.0, 1 << 20};
  layout.tables[2].admission = {wire::AdmissionKind::kProbability, 0, 0.25, 0};
  layout.tables[2].eviction = {true, 100, 60000, 2, 50, wire::EvictionOrder::kLfu};
  return layout;
}

inline const std::vector<int64_t>& sample_keys() {
  static const std::vector<int64_t> keys = {99, 0, 42};
  return keys;
}

inline std::vector<wire::TableRef> sample_tables() {
  return {{.table = 0, .row_count = 3, .dim = 3, .state_elements = 3, .counts = true, .step = 4},
          {.table = 1, .row_count = 3, .dim = 2, .state_elements = 0, .counts = false, .step = 5},
          {.table = 2, .row_count = 0, .dim = 1, .state_elements = 1, .counts = true, .step = 0}};
}

inline std::vector<wire::BlockRef> sample_blocks() {
  return {{.block = 0, .size_bytes = 20, .state_bytes = 20, .step = 1},
          {.block = 2, .size_bytes = 24, .state_bytes = 0, .step = 2},
          {.block = 3, .size_bytes = 0, .state_bytes = 0, .step = 3}};
}

inline void fill_keys(const std::vector<int64_t*>& keys) {
  for (size_t t = 0; t < 2; ++t) std::memcpy(keys[t], sample_keys().data(), 24);
}

// Element i of section s is 100 s + i.
inline void fill_floats(const std::vector<float*>& sections,
                        const std::vector<wire::TableRef>& refs) {
  for (size_t s = 0; s < sections.size(); ++s) {
    for (size_t i = 0; i < refs[s].row_count * refs[s].dim; ++i) {
      sections[s][i] = static_cast<float>(100 * s + i);
    }
  }
}

inline Buffer sample_push(const wire::ParamSetLayout& layout) {
  wire::PushHeader header;
  header.round = 17;
  header.step = 5;
  header.weight = 2.5;
  header.samples = 1000;
  header.steps = 7;
  header.clip_value = 0.5;
  header.clip_norm = 1.5;
  header.configs = layout.configs;
  const auto tables = sample_tables();
  wire::FilledPush filled = wire::layout_push(header, sample_blocks(), tables, nullptr);
  fill_keys(filled.keys);
  fill_floats(filled.rows, tables);
  std::memset(filled.blocks[0], 0x11, 20);
  std::memset(filled.blocks[1], 0x22, 24);
  return std::move(filled.payload);
}

inline Buffer sample_holding_push(const wire::ParamSetLayout& layout) {
  wire::PushHeader header;
  header.configs = layout.configs;
  const std::vector<uint64_t> used{7, 9};
  wire::HoldRefs holds;
  holds.since = 11;
  holds.kept_from = 13;
  holds.tables = sample_tables();
  holds.used = used;
  wire::FilledPush filled = wire::layout_push(header, {}, {}, nullptr, &holds);
  fill_keys(filled.held);
  return std::move(filled.payload);
}

// Both blocks have gone before it.
inline Buffer sample_parted_push(const wire::ParamSetLayout& layout) {
  wire::PushHeader header;
  header.round = 3;
  header.configs = layout.configs;
  std::vector<wire::BlockRef> blocks = sample_blocks();
  for (wire::BlockRef& block : blocks) block.size_bytes = 0;
  return std::move(wire::layout_push(header, blocks, {}, nullptr).payload);
}

inline Buffer sample_part() {
  wire::FilledPush filled = wire::layout_part(3, sample_blocks(), nullptr);
  std::memset(filled.blocks[0], 0x11, 20);
  std::memset(filled.blocks[1], 0x22, 24);
  return std::move(filled.payload);
}

inline Buffer sample_store() {
  const auto tables = sample_tables();
  wire::FilledStore filled = wire::layout_store(sample_blocks(), tables, nullptr);
  fill_keys(filled.keys);
  fill_floats(filled.weights, tables);
  for (size_t i = 0; i < 9; ++i) filled.state[0][i] = static_cast<float>(i) / 2;
  for (uint32_t i = 0; i < 3; ++i) filled.counts[0][i] = i + 1;
  std::memset(filled.block_weights[0], 0x33, 20);
  std::memset(filled.block_state[0], 0x44, 20);
  std::memset(filled.block_weights[1], 0x55, 24);
  return std::move(filled.payload);
}

inline Buffer sample_run() {
  wire::FilledRun filled = wire::layout_run({.table = 0,
                                             .dim = 3,
                                             .begin = 10,
                                             .end = 16,
                                             .rows = 2,
                                             .state_elements = 3,
                                             .counts = true,
                                             .step = 4},
                                            nullptr);
  for (size_t i = 0; i < 6; ++i) filled.weights[i] = static_cast<float>(i);
  for (size_t i = 0; i < 6; ++i) filled.state[i] = static_cast<float>(i) / 2;
  for (uint32_t i = 0; i < 2; ++i) filled.counts[i] = i + 1;
  return std::move(filled.payload);
}

inline Buffer sample_run_alike() {
  wire::FilledRun filled = wire::layout_run(
      {.table = 1, .dim = 2, .begin = 5, .end = 1u << 30, .rows = 3, .alike = true}, nullptr);
  filled.weights[0] = 0.5f;
  filled.weights[1] = -1;
  return std::move(filled.payload);
}

inline Buffer sample_dense() {
  wire::FilledPush filled = wire::layout_dense(18, sample_blocks(), nullptr, {}, 12);
  std::memset(filled.blocks[0], 0x66, 20);
  std::memset(filled.blocks[1], 0x77, 24);
  return std::move(filled.payload);
}

inline Buffer sample_changes() {
  wire::ChangesHeader header;
  header.version = wire::Version{20, 300};
  header.version.steps = 41;
  header.cut_wanted = 12;
  header.members = 3;
  header.more = true;
  const auto tables = sample_tables();
  wire::FilledPush filled = wire::layout_changes(header, sample_blocks(), tables, nullptr);
  fill_keys(filled.keys);
  fill_floats(filled.rows, tables);
  std::memset(filled.blocks[0], 0x11, 20);
  std::memset(filled.blocks[1], 0x22, 24);
  return std::move(filled.payload);
}

inline Buffer sample_dense_with_rows() {
  const auto tables = sample_tables();
  wire::FilledPush filled = wire::layout_dense(18, {}, nullptr, tables);
  fill_keys(filled.keys);
  fill_floats(filled.rows, tables);
  return std::move(filled.payload);
}

inline Buffer sample_pull() {
  const auto tables = sample_tables();
  wire::FilledKeys filled = wire::layout_pull(tables, nullptr, 21);
  fill_keys(filled.keys);
  return std::move(filled.payload);
}

inline Buffer sample_rows() {
  const auto tables = sample_tables();
  wire::FilledRows filled = wire::layout_rows(19, tables, nullptr);
  fill_floats(filled.rows, tables);
  return std::move(filled.payload);
}

// Of table "items", over two pieces of a file.
inline wire::Load sample_load() {
  wire::Load load;
  load.table = 1;
  load.kind = wire::LoadKind::kReplace;
  load.seed = 77;
  load.version = {5, 160, 10};
  load.table_step = 4;
  load.snapshot = "snap-000000000005-5f3a";
  load.file = "s000-t001-0000.safetensors";
  load.file_bytes = 300000;
  load.row_begin = 3;
  load.row_end = 1003;
  load.offsets = {512, 80512, 160512, 240512, 244612, 0};
  load.checksums = {0x12345678, 0x9abcdef0};
  return load;
}

inline wire::CutStatus sample_cut_status() {
  wire::CutStatus status;
  status.state = wire::CutState::kDone;
  status.shard = 2;
  status.reason = "why";
  status.version = {12, 300, 41};
  status.table_steps = {9, 8, 7};
  status.block_steps = {6, 0};
  status.members = {0, 1, 3};
  status.present = {0, 1};
  status.lost = {3};
  status.files = {{"s002-t001-0000.safetensors", 1, 5, 300000, {0x11223344, 0x55667788}},
                  {"s002-dense.safetensors", wire::kDenseFile, 0, 0, {}}};
  status.base = 5;
  status.can_be_base = true;
  return status;
}

struct Sample {
  std::string name;
  Buffer payload;
  std::function<void(std::span<const uint8_t>)> decode;
};

inline wire::AuthMessage sample_handshake() {
  wire::AuthMessage message;
  message.step = wire::AuthStep::kAnswer;
  message.purpose = wire::Purpose::kShuffle;
  message.nonce.fill(0x11);
  message.mac.fill(0x22);
  return message;
}

inline std::vector<Sample> all_samples() {
  const auto layout = std::make_shared<wire::ParamSetLayout>(sample_layout());
  using Bytes = std::span<const uint8_t>;
  std::vector<Sample> samples;
  const auto add = [&](const char* name, Buffer payload, std::function<void(Bytes)> decode) {
    samples.push_back({name, std::move(payload), std::move(decode)});
  };
  add("hello", encode(wire::Hello{4, 2, 1, 77, "host-a pid 1", 5}),
      [](Bytes b) { wire::decode_hello(b); });
  add("error", encode(wire::ErrorReply{ErrorCode::kFenced, "gone"}),
      [](Bytes b) { wire::decode_error(b); });
  add("probe", encode(wire::ProbeReply{true, {1, 2, 3}, 7}),
      [](Bytes b) { wire::decode_probe_reply(b); });
  add("layout", encode(*layout), [](Bytes b) { wire::decode_layout(b); });
  wire::ParamSetLayout grouped = sample_layout();
  grouped.trainer_groups = {0, 1, 0};
  add("layout with groups", encode(grouped), [](Bytes b) { wire::decode_layout(b); });
  add("layout with a remote table", encode(sample_remote_layout()),
      [](Bytes b) { wire::decode_layout(b); });
  add("layout with an open table", encode(sample_open_layout()),
      [](Bytes b) { wire::decode_layout(b); });
  add("norm", encode(wire::PushNorm{3, {2.0}}), [](Bytes b) { wire::decode_push_norm(b); });
  add("norms", encode(wire::PushNorm{3, {2.0, 0.5, INFINITY}}),
      [](Bytes b) { wire::decode_push_norm(b, 3); });
  add("commits", encode(wire::Commit{3, {2.0, 0.5, INFINITY}}),
      [](Bytes b) { wire::decode_commit(b, 3); });
  add("commit", encode(wire::Commit{3, {2.0}}), [](Bytes b) { wire::decode_commit(b); });
  add("join", encode(wire::Join{wire::JoinStep::kMember, 9}),
      [](Bytes b) { wire::decode_join(b); });
  add("round", encode(wire::RoundReply{9}), [](Bytes b) { wire::decode_round_reply(b); });
  add("barrier", encode(wire::BarrierReply{{{0, 3}, {2, 5}}}),
      [](Bytes b) { wire::decode_barrier_reply(b); });
  add("fetch", encode(wire::FetchRequest{true, 1, 1, sample_keys()}),
      [](Bytes b) { wire::decode_fetch(b); });
  const auto push = [layout](Bytes b) { wire::decode_push(b, *layout); };
  add("push", sample_push(*layout), push);
  add("push with holds", sample_holding_push(*layout), push);
  add("push behind parts", sample_parted_push(*layout), push);
  add("part", sample_part(), [layout](Bytes b) { wire::decode_part(b, *layout); });
  const auto dense = [layout](Bytes b) { wire::decode_dense(b, *layout); };
  add("dense with rows", sample_dense_with_rows(), dense);
  add("dense", sample_dense(), dense);
  add("changes", sample_changes(), [layout](Bytes b) { wire::decode_changes(b, *layout); });
  add("pull", sample_pull(), [layout](Bytes b) { wire::decode_pull(b, *layout); });
  add("rows", sample_rows(), [](Bytes b) {
    wire::Version version;
    wire::decode_rows(b, sample_tables(), &version);
  });
  add("store", sample_store(), [layout](Bytes b) { wire::decode_store(b, *layout); });
  const auto run = [layout](Bytes b) { wire::decode_run(b, *layout); };
  add("run", sample_run(), run);
  add("run of rows that are alike", sample_run_alike(), run);
  add("fetch of a run", encode(wire::FetchRun{1, 5, 9}),
      [layout](Bytes b) { wire::decode_fetch_run(b, *layout); });
  add("cut", encode(wire::Cut{12, 3000, wire::CutStep::kAnnounce, "snap-12", 11}),
      [](Bytes b) { wire::decode_cut(b); });
  add("reply to a cut", encode(wire::CutReply{12, true, 34, "snap-12", "late", true}),
      [](Bytes b) { wire::decode_cut_reply(b); });
  add("query of a cut", encode(wire::CutQuery{0, "token-7", true}),
      [](Bytes b) { wire::decode_cut_query(b); });
  add("load", encode(sample_load()), [layout](Bytes b) { wire::decode_load(b, *layout); });
  add("query of a table", encode(wire::TableQuery{3}),
      [](Bytes b) { wire::decode_table_query(b); });
  add("counts of a table", encode(wire::TableCounts{1, 2, 3, 4, 5, 6}),
      [](Bytes b) { wire::decode_table_counts(b); });
  add("shrunk", encode(wire::Shrunk{7}), [](Bytes b) { wire::decode_shrunk(b); });
  add("handshake", encode(sample_handshake()), [](Bytes b) { wire::decode_auth(b); });
  add("status of a cut", encode(sample_cut_status()), [](Bytes b) { wire::decode_cut_status(b); });
  return samples;
}

}  // namespace cpudist::testing
