// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// New records out of those of a store: several of one instance as one, and records whose slots
// have the values of others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "data/parse/schema.h"
#include "data/store/content.h"

namespace cpudist::data {

struct Merged {
  std::vector<Slab> slabs;
  uint64_t left_out = 0;  // records
};

// One record per instance id, in the order of the first of each. Slots of any number have the
// values of all, in their order; all others those of the first. With `size`, ids that another
// number of records carries are left out; 0: none is. Costs sorting 16 bytes per record. Throws
// Error(kInvalidArgument): a record that would be larger than one can be.
Merged merged_by_instance(const Schema& schema, const Content& content, size_t size);

// The same records in the same order, but for the slots named by their numbers among the used
// ones: record i has the values there of record p(i), where p is a permutation that the seed
// draws, one for all these slots.
std::vector<Slab> with_slots_exchanged(const Schema& schema, const Content& content,
                                       const std::vector<size_t>& used_slots, uint64_t seed);

}  // namespace cpudist::data
