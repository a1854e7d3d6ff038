// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Runs of rows on their way to a server and back: of the keys begin .. end those that the server
// owns, in the order of the keys. Both sides know which these are, so no key travels.
#pragma once

#include <cstdint>
#include <span>

#include "wire/layout.h"
#include "wire/rows.h"

namespace cpudist::wire {

// Keys of one run: a server looks at each of them, whatever little a frame has.
inline constexpr uint64_t kRunKeysMax = 1ull << 30;

// What a frame says of a run. `rows`: how many of its keys the server owns.
struct RunRef {
  uint32_t table = 0;
  uint32_t dim = 0;
  uint64_t begin = 0;
  uint64_t end = 0;  // exclusive
  uint64_t rows = 0;
  uint32_t state_elements = 0;  // per row; 0: the optimizer's initial state
  bool counts = false;          // updates of each row travel; else there were none
  bool alike = false;           // one row of weights stands for all
  uint64_t step = 0;            // updates of the table as a whole
};

struct RunView {
  RunRef ref;
  std::span<const float> weights;  // rows * dim, or dim if they are alike
  std::span<const float> state;    // rows * state_elements
  std::span<const uint32_t> counts;
};

struct FilledRun {
  Buffer payload;
  float* weights = nullptr;
  float* state = nullptr;      // nullptr where the ref has none
  uint32_t* counts = nullptr;  // nullptr where the ref has none
};

// As the other layout_ functions: the payload, to be filled in place.
FilledRun layout_run(const RunRef& ref, const Pool& pool);
// Throws kProtocol for a table, a row length, keys or sizes that do not fit `layout`. Left to the
// receiver: how many of the keys it owns, and how much state its rows have.
RunView decode_run(std::span<const uint8_t> payload, const ParamSetLayout& layout);

struct FetchRun {  // kFetchRun, answered with a run with state and counts
  uint32_t table = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};
Buffer encode(const FetchRun& message);
FetchRun decode_fetch_run(std::span<const uint8_t> payload, const ParamSetLayout& layout);

}  // namespace cpudist::wire
