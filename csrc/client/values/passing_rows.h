// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Memory of lookups that keep no row, which the next one uses again: fresh pages would cost more
// than what is done in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "kernels/dedupe.h"

namespace cpudist::client {

// Distinct rows of such a lookup that are looked up at once: what they take is all that it takes
// beside what it gives, and what stays between lookups is a few megabytes of a set.
inline constexpr size_t kPassingRows = 32768;

struct PassingRows {
  kernels::KeyDeduper deduper;
  std::vector<int64_t> unique;
  std::vector<uint32_t> inverse;
  // Where some values are here: which are not, and at which place of the distinct ones.
  std::vector<int64_t> missing;
  std::vector<uint32_t> missing_at;
  std::vector<const float*> rows;   // of the distinct ones
  std::vector<const void*> of_ids;  // the same by id
};

// One of a parameter set. Thread safety: whoever holds the mutex; who does not get it at once takes
// memory of its own.
struct SharedPassingRows {
  std::mutex mutex;
  PassingRows rows;
};

}  // namespace cpudist::client
