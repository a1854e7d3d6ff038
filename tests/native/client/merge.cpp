// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Arithmetic on packed gradients: several steps merged into one push, clipping.

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "client/arrivals/queue.h"
#include "client/push/packing.h"
#include "client/state.h"
#include "kernels/hash.h"
#include "support/check.h"

namespace {

using namespace cpudist;  // NOLINT: a test of this namespace

constexpr uint32_t kMergedDim = 4;

// Two servers. Group 0: table 0 and the float32 block on server 0. Group 1: table 1 and the float64
// block on server 1.
struct Packed {
  Packed() : owners(cpudist::kernels::kBucketCount) {
    for (uint32_t b = 0; b < owners.size(); ++b) {
      owners[b] = static_cast<uint16_t>(wire::owner_of_bucket(b, 2));
    }
    layout.mode = wire::UpdateMode::kOnArrival;
    cpudist::kernels::OptimizerConfig sgd;
    sgd.lr = 1.0;
    layout.configs = {sgd, sgd};
    layout.tables = {wire::TableSpec{"a", 50, kMergedDim, 0},
                     wire::TableSpec{"b", 50, kMergedDim, 1}};
    layout.blocks = {wire::BlockSpec{"w", 2, wire::DType::kFloat32, 0, 0, 0, 0, 1},
                     wire::BlockSpec{"v", 2, wire::DType::kFloat64, 1, 1, 1, 0, 1}};
    set = std::make_unique<client::SetState>(0, layout, owners, 2);
    pool = std::make_shared<BufferPool>(1 << 20);
  }
  // A gradient of `value` for each of these keys of `table` and for the dense parameters named.
  client::QueuedPush step(uint32_t table, const std::vector<int64_t>& keys, float value,
                          const std::vector<uint32_t>& parameters = {}) {
    const std::vector<float> rows(keys.size() * kMergedDim, value);
    const std::vector<float> narrow(2, value);
    const std::vector<double> wide(2, value);
    client::StepPush push;
    push.configs = layout.configs;
    push.samples = 3;
    push.weights = {w.data(), v.data()};
    for (const uint32_t parameter : parameters) {
      const void* values = parameter == 0 ? static_cast<const void*>(narrow.data()) : wide.data();
      push.parameters.push_back({parameter, values});
    }
    if (!keys.empty()) {
      set->table(table).take_missing(std::span(keys));
      push.tables = {{table, keys.data(), keys.size(), rows.data()}};
    }
    prepare_push(*set, push);
    client::QueuedPush queued;
    queued.configs = layout.configs;
    queued.payloads = pack_push(*set, push, pool);
    return queued;
  }

  std::vector<uint16_t> owners;
  wire::ParamSetLayout layout;
  std::unique_ptr<client::SetState> set;
  wire::Pool pool;
  std::vector<float> w = std::vector<float>(2);
  std::vector<double> v = std::vector<double>(2);
};

struct Contents {
  std::map<uint32_t, double> blocks;                    // first value
  std::map<std::pair<uint32_t, int64_t>, double> rows;  // first value
  uint64_t samples = 0;
};

Contents contents(const std::vector<Buffer>& payloads, const wire::ParamSetLayout& layout) {
  Contents all;
  for (const Buffer& payload : payloads) {
    const wire::PushView view = wire::decode_push({payload.data(), payload.size()}, layout);
    all.samples = view.header.samples;
    for (const wire::DenseSection& section : view.blocks) {
      double wide = 0;
      float narrow = 0;
      if (layout.blocks[section.block].dtype == wire::DType::kFloat64) {
        std::memcpy(&wide, section.values.data(), sizeof wide);
      } else {
        std::memcpy(&narrow, section.values.data(), sizeof narrow);
      }
      all.blocks[section.block] = wide + static_cast<double>(narrow);
    }
    for (const wire::TableSection& section : view.tables) {
      for (size_t i = 0; i < section.keys.size(); ++i) {
        const auto place = all.rows.emplace(std::pair{section.table, section.keys[i]},
                                            section.rows[i * kMergedDim]);
        CHECK(place.second);  // a key stands in one payload, once
      }
    }
  }
  return all;
}

using Rows = std::map<std::pair<uint32_t, int64_t>, double>;

TEST(client_merge_by_sum_and_by_mean_per_group) {
  Packed f;
  std::vector<client::QueuedPush> steps;
  steps.push_back(f.step(0, {7, 3, 7}, 1.0f, {0}));  // 7 twice in one step
  steps.push_back(f.step(0, {3, 9}, 4.0f, {0, 1}));
  steps.push_back(f.step(1, {5}, 8.0f, {1}));
  const Contents sums = contents(merge_pushes(*f.set, steps, {false, false}, f.pool), f.layout);
  CHECK_EQ(sums.samples, 9);
  CHECK((sums.blocks == std::map<uint32_t, double>{{0, 5.0}, {1, 12.0}}));
  CHECK((sums.rows == Rows{{{0, 7}, 2.0}, {{0, 3}, 5.0}, {{0, 9}, 4.0}, {{1, 5}, 8.0}}));
  // Over the steps that have the table or the block: two have table 0, one has table 1.
  const Contents means = contents(merge_pushes(*f.set, steps, {true, true}, f.pool), f.layout);
  CHECK((means.blocks == std::map<uint32_t, double>{{0, 2.5}, {1, 6.0}}));
  CHECK((means.rows == Rows{{{0, 7}, 1.0}, {{0, 3}, 2.5}, {{0, 9}, 2.0}, {{1, 5}, 8.0}}));
  const Contents mixed = contents(merge_pushes(*f.set, steps, {true, false}, f.pool), f.layout);
  CHECK((mixed.blocks == std::map<uint32_t, double>{{0, 2.5}, {1, 12.0}}));
}

TEST(client_merge_merging_keeps_the_bits_of_float64) {
  Packed f;
  std::vector<client::QueuedPush> steps;
  for (int i = 0; i < 3; ++i) steps.push_back(f.step(0, {}, 1.0f, {1}));
  const double tiny = std::ldexp(1.0, -40);
  for (const size_t i : {size_t{0}, size_t{2}}) {
    Buffer& payload = steps[i].payloads[1];
    const wire::PushView view = wire::decode_push({payload.data(), payload.size()}, f.layout);
    std::memcpy(const_cast<uint8_t*>(view.blocks[0].values.data()), &tiny, sizeof tiny);
  }
  const Contents sums = contents(merge_pushes(*f.set, steps, {false, false}, f.pool), f.layout);
  CHECK_EQ(sums.blocks.at(1), 1.0 + 2 * tiny);
}

TEST(client_merge_clips_by_value_then_by_the_norm_over_all_servers) {
  Packed f;
  // 3 rows of 4, two float32 and two float64: 16 values.
  client::QueuedPush step = f.step(0, {1, 2, 30}, -5.0f, {0, 1});
  clip_push(*f.set, step.payloads, 2.0, 0.0);
  Contents found = contents(step.payloads, f.layout);
  CHECK((found.blocks == std::map<uint32_t, double>{{0, -2.0}, {1, -2.0}}));
  CHECK_EQ(found.rows.at({0, 30}), -2.0);

  clip_push(*f.set, step.payloads, 1.0, 2.0);  // norm after clipping by value: 4
  found = contents(step.payloads, f.layout);
  const double ratio = 2.0 / (4.0 + 1e-6);
  CHECK_EQ(found.blocks.at(1), -ratio);
  CHECK_EQ(found.blocks.at(0), -static_cast<float>(ratio));
  for (const auto& [key, value] : found.rows) CHECK_EQ(value, -static_cast<float>(ratio));

  client::QueuedPush small = f.step(0, {1}, 0.5f);  // norm 1
  clip_push(*f.set, small.payloads, 0.0, 2.0);
  CHECK_EQ(contents(small.payloads, f.layout).rows.at({0, 1}), 0.5);
}

TEST(client_merge_clips_every_tensor_by_its_own_norm_over_all_servers) {
  Packed f;
  // 3 rows of 4 on both servers, two float32 and two float64.
  client::QueuedPush step = f.step(0, {1, 2, 30}, -5.0f, {0, 1});
  clip_push(*f.set, step.payloads, 0.0, 6.0, true);
  const Contents found = contents(step.payloads, f.layout);
  const double rows = 6.0 / (std::sqrt(12 * 25.0) + 1e-6);
  for (const auto& [key, value] : found.rows) CHECK_EQ(value, -5.0f * static_cast<float>(rows));
  const double dense = 6.0 / (std::sqrt(50.0) + 1e-6);
  CHECK_EQ(found.blocks.at(1), -5.0 * dense);
  CHECK_EQ(found.blocks.at(0), -5.0f * static_cast<float>(dense));
}

TEST(client_merge_clipping_spreads_what_is_not_a_number) {
  Packed f;
  client::QueuedPush step = f.step(0, {1, 2}, std::nanf(""), {1});
  clip_push(*f.set, step.payloads, 0.0, 1.0);
  CHECK(std::isnan(contents(step.payloads, f.layout).blocks.at(1)));
}

}  // namespace
