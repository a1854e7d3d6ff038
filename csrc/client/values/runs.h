// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Runs of rows to and from the servers, as whole tables travel: no key is sent, since each server
// knows which of them it owns.
#pragma once

#include <cstdint>

#include "client/shared.h"
#include "client/state.h"

namespace cpudist::client {

// Rows begin .. end of one table in the trainer's memory; null where there are none.
template <typename Float, typename Count>
struct RunOf {
  uint32_t table = 0;
  uint64_t begin = 0;
  uint64_t end = 0;  // exclusive
  Float* weights = nullptr;
  Float* state = nullptr;
  Count* counts = nullptr;
};
using RunValues = RunOf<const float, const uint32_t>;
using RunPlaces = RunOf<float, uint32_t>;

// The caller has called Shared::sequence(). Packs what is sent next while the servers store.
void store_run(Shared& shared, SetState& set, const RunValues& rows, uint64_t step);
// After Shared::settle(); returns the updates of the table as a whole.
uint64_t fetch_run(Shared& shared, SetState& set, const RunPlaces& rows);

}  // namespace cpudist::client
