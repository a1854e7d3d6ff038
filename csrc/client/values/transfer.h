// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Weights with their optimizer state to and from the servers, in chunks, all servers at once. What
// the memory is like stands at the methods of ParamSet.
#pragma once

#include <cstdint>
#include <span>

#include "client/shared.h"
#include "client/state.h"

namespace cpudist::client {

// Rows of one table in the trainer's memory; null where there are none.
struct RowValues {
  uint32_t table = 0;
  std::span<const int64_t> keys;
  const float* weights = nullptr;
  const float* state = nullptr;
  const uint32_t* counts = nullptr;
};

// ---- the caller has called Shared::sequence() ----
void store_table(Shared& shared, SetState& set, const RowValues& rows, uint64_t step);
void store_parameter(Shared& shared, SetState& set, uint32_t parameter, const void* weights,
                     const void* state, uint64_t step, const void* average);

// ---- after Shared::settle(); returns the updates of the parameter as a whole ----
uint64_t fetch_parameter(Shared& shared, SetState& set, uint32_t parameter, void* weights,
                         void* state);

}  // namespace cpudist::client
