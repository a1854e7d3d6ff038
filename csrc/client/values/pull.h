// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows and dense values from the servers to where the trainer reads them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/prefetch.h"
#include "client/shared.h"
#include "client/state.h"
#include "client/values/guessed_ids.h"

namespace cpudist::client {

void check_bound(const TableCache& cache);  // throws kInvalidArgument if it has no weight

// Makes the rows of `ids` current here. Returns how many were pulled for that. Throws
// kRowOutOfRange.
uint64_t look_up(Shared& shared, SetState& set, Prefetcher& prefetcher, const ComingIds& ids);
// The same, and copies them to `out`, [count, dim], in the order of the ids. Rows of a remote table
// that are not to be kept leave nothing behind: neither marks nor memory.
uint64_t look_up_into(Shared& shared, SetState& set, Prefetcher& prefetcher, const ComingIds& ids,
                      float* out, bool keep);
// The same as look_up() of what lookups are likely to want, of all tables in one request per
// server. Returns for each how many rows were pulled for it. Ids of which one is no row are left to
// their lookup, and all of them while this trainer takes no part.
std::vector<uint64_t> pull_together(Shared& shared, SetState& set, Prefetcher& prefetcher,
                                    std::span<const GuessedIds> guesses);
// The values of distinct rows, as the servers have them, for who reads the weight itself: they
// count as read for no gradient, and as pulled for none.
void read_rows(Shared& shared, SetState& set, uint32_t table, std::span<const int64_t> keys);
// The values of distinct rows of a table of either kind, as the servers have them, to `out`,
// [keys, dim]: nothing here changes. Throws kRowOutOfRange.
void fetch_rows(Shared& shared, SetState& set, uint32_t table, std::span<const int64_t> keys,
                float* out);
// Every row of every static table, in chunks, as the servers have them.
void pull_all_rows(Shared& shared, SetState& set);
// `weights`: base of every dense parameter, in order.
void pull_dense(Shared& shared, SetState& set, std::span<void* const> weights);

}  // namespace cpudist::client
