// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows that a trainer stores by their keys, and fetches as a run.

#include <cstdint>
#include <numeric>
#include <vector>

#include "client/client.h"
#include "client/param_set.h"
#include "support/check.h"
#include "support/inproc_servers.h"

namespace {

using namespace cpudist;  // NOLINT: a test of this namespace

constexpr uint32_t kStoredRows = 40;
constexpr uint32_t kStoredDim = 4;

wire::ParamSetLayout stored_layout() {
  kernels::OptimizerConfig adagrad;
  adagrad.kind = kernels::OptimizerKind::kAdagrad;
  adagrad.lr = 0.1;
  adagrad.eps = 1e-10;
  wire::ParamSetLayout layout;
  layout.configs = {adagrad};
  layout.tables = {wire::TableSpec{"words", kStoredRows, kStoredDim, 0}};
  return layout;
}

}  // namespace

TEST(stored_rows_of_keys_in_any_order_come_back_with_state_and_counts) {
  testing::InprocServers servers(1, 3, {});
  const auto client = servers.make_client(servers.client_options(0));
  client->connect();
  const auto set = client->open(stored_layout());
  std::vector<int64_t> keys(kStoredRows);
  std::vector<float> weights(kStoredRows * kStoredDim);
  std::vector<float> state(kStoredRows * kStoredDim);
  std::vector<uint32_t> counts(kStoredRows);
  for (uint32_t i = 0; i < kStoredRows; ++i) keys[i] = (i * 7) % kStoredRows;
  std::iota(weights.begin(), weights.end(), 1.0f);
  std::iota(state.begin(), state.end(), 1000.0f);
  std::iota(counts.begin(), counts.end(), 1u);
  set->store_table(0, keys, weights.data(), state.data(), counts.data(), 17);
  set->ready();

  std::vector<float> found_weights(kStoredRows * kStoredDim);
  std::vector<float> found_state(kStoredRows * kStoredDim);
  std::vector<uint32_t> found_counts(kStoredRows);
  uint64_t step = 0;
  set->fetch_run({0, 0, kStoredRows, found_weights.data(), found_state.data(), found_counts.data()},
                 &step);
  CHECK_EQ(step, 17u);
  for (uint32_t i = 0; i < kStoredRows; ++i) {
    const auto key = static_cast<size_t>(keys[i]);
    CHECK_EQ(found_counts[key], counts[i]);
    for (uint32_t d = 0; d < kStoredDim; ++d) {
      CHECK_EQ(found_weights[key * kStoredDim + d], weights[i * kStoredDim + d]);
      CHECK_EQ(found_state[key * kStoredDim + d], state[i * kStoredDim + d]);
    }
  }
}
