// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A step packed for several servers and read back with the decoders the servers use.

#include "client/push/packing.h"
#include "client/state.h"

#include <cstring>
#include <map>
#include <numeric>
#include <vector>

#include "base/errors.h"
#include "kernels/hash.h"
#include "support/check.h"

namespace {

using namespace cpudist;  // NOLINT: a test of this namespace
using cpudist::kernels::OptimizerConfig;

constexpr uint32_t kServers = 3;
constexpr uint32_t kPackedDim = 4;

struct Fixture {
  Fixture() : owners(cpudist::kernels::kBucketCount) {
    for (size_t b = 0; b < owners.size(); ++b) {
      owners[b] = static_cast<uint16_t>(wire::owner_of_bucket(static_cast<uint32_t>(b), kServers));
    }
    OptimizerConfig sgd;
    sgd.lr = 0.1;
    layout.configs = {sgd};
    layout.tables = {wire::TableSpec{"a", 50, kPackedDim, 0},
                     wire::TableSpec{"b", 50, kPackedDim, 0}};
    layout.blocks = {wire::BlockSpec{"w.block0", 3, wire::DType::kFloat32, 2, 0, 0, 0, 1},
                     wire::BlockSpec{"w.block1", 2, wire::DType::kFloat32, 0, 0, 0, 3, 1},
                     wire::BlockSpec{"v", 2, wire::DType::kFloat64, 2, 0, 1, 0, 1}};
    set = std::make_unique<client::SetState>(0, layout, owners, kServers);
    pool = std::make_shared<BufferPool>(1 << 20);
    step.configs = layout.configs;
    step.weights = {w.data(), v.data()};
  }
  void pull(uint32_t table, std::vector<int64_t> ids) {
    set->table(table).take_missing(std::span<const int64_t>(ids));
  }

  std::vector<uint16_t> owners;
  wire::ParamSetLayout layout;
  std::unique_ptr<client::SetState> set;
  wire::Pool pool;
  client::StepPush step;
  std::vector<float> w = std::vector<float>(5);
  std::vector<double> v = std::vector<double>(2);
};

wire::PushView decode(const Buffer& payload, const wire::ParamSetLayout& layout) {
  return wire::decode_push({payload.data(), payload.size()}, layout);
}

TEST(client_packing_sums_duplicates_and_splits_by_owner) {
  Fixture f;
  f.set->round = 9;
  f.step.weight = 0.5;
  f.step.samples = 12;
  const std::vector<int64_t> keys{7, 3, 7, 40, 3, 7};
  std::vector<float> rows(keys.size() * kPackedDim);
  std::iota(rows.begin(), rows.end(), 1.0f);
  f.pull(1, keys);
  f.step.tables = {client::TableGradient{1, keys.data(), keys.size(), rows.data()}};
  prepare_push(*f.set, f.step);
  const std::vector<Buffer> payloads = pack_push(*f.set, f.step, f.pool);
  CHECK_EQ(payloads.size(), kServers);
  CHECK_EQ(packed_rows(*f.set), 3);
  std::map<int64_t, float> first;  // key -> first element of its sum
  for (uint32_t s = 0; s < kServers; ++s) {
    const wire::PushView view = decode(payloads[s], f.layout);
    CHECK_EQ(view.header.round, 9);
    CHECK_EQ(view.header.weight, 0.5);
    CHECK_EQ(view.header.samples, 12);
    // Every server learns that there is a gradient for the table, with rows or without.
    CHECK_EQ(view.tables.size(), 1);
    CHECK_EQ(view.tables[0].table, 1);
    for (size_t i = 0; i < view.tables[0].keys.size(); ++i) {
      const int64_t key = view.tables[0].keys[i];
      const uint64_t salt = cpudist::kernels::table_salt(f.layout.tables[1].name);
      CHECK_EQ(f.owners[cpudist::kernels::bucket_of(key, salt)], s);
      first[key] = view.tables[0].rows[i * kPackedDim];
    }
  }
  const std::map<int64_t, float> expected{{7, 1.f + 9.f + 21.f}, {3, 5.f + 17.f}, {40, 13.f}};
  CHECK(first == expected);
}

TEST(client_packing_cuts_parameters_into_blocks) {
  Fixture f;
  const std::vector<float> gradient{1, 2, 3, 4, 5};
  const std::vector<double> other{6, 7};
  f.step.parameters = {{1, other.data()}, {0, gradient.data()}};
  const std::vector<Buffer> payloads = pack_push(*f.set, f.step, f.pool);
  const wire::PushView at_0 = decode(payloads[0], f.layout);
  CHECK_EQ(at_0.blocks.size(), 1);
  CHECK_EQ(at_0.blocks[0].block, 1);
  CHECK_EQ(std::memcmp(at_0.blocks[0].values.data(), &gradient[3], 8), 0);
  CHECK_EQ(decode(payloads[1], f.layout).blocks.size(), 0);
  const wire::PushView at_2 = decode(payloads[2], f.layout);
  CHECK_EQ(at_2.blocks.size(), 2);
  CHECK_EQ(at_2.blocks[0].block, 0);
  CHECK_EQ(std::memcmp(at_2.blocks[0].values.data(), gradient.data(), 12), 0);
  CHECK_EQ(std::memcmp(at_2.blocks[1].values.data(), other.data(), 16), 0);
}

TEST(client_packing_refuses_unpulled_rows_and_short_arguments) {
  Fixture f;
  const std::vector<int64_t> keys{7};
  const std::vector<float> rows(kPackedDim);
  f.step.tables = {client::TableGradient{0, keys.data(), keys.size(), rows.data()}};
  CHECK_THROWS(prepare_push(*f.set, f.step), Error);
  f.pull(0, keys);
  prepare_push(*f.set, f.step);
  f.step.weights.pop_back();
  CHECK_THROWS(prepare_push(*f.set, f.step), Error);
}

TEST(client_packing_writes_blocks_back_into_their_parameter) {
  Fixture f;
  const std::vector<wire::BlockRef> refs{{1, 8}, {2, 16}};
  wire::FilledPush filled = wire::layout_dense(4, refs, f.pool);
  const std::vector<float> block{8, 9};
  const std::vector<double> other{1.5, 2.5};
  std::memcpy(filled.blocks[0], block.data(), 8);
  std::memcpy(filled.blocks[1], other.data(), 16);
  const wire::Frame reply{wire::FrameHeader{}, std::move(filled.payload)};
  CHECK_EQ(unpack_dense(*f.set, reply, {}).round, 4u);
  CHECK(f.w == std::vector<float>(5));
  CHECK_EQ(unpack_dense(*f.set, reply, f.step.weights).round, 4u);
  CHECK((f.w == std::vector<float>{0, 0, 0, 8, 9}));
  CHECK(f.v == other);
}

}  // namespace
