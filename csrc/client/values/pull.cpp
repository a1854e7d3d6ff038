// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows and dense blocks from the servers into the trainer's weights.
#include "client/values/pull.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "client/push/coding.h"
#include "client/push/packing.h"
#include "kernels/dedupe.h"
#include "kernels/gather_scatter.h"
#include "wire/codec/parts.h"

namespace cpudist::client {

namespace {

// Rows of one lookup that travel in one reply; far above a batch, far below a frame's limit.
constexpr uint64_t kPullBytes = 256ull << 20;

// Distinct rows of a lookup that is forgotten that are looked up at once: what they take is all
// that it takes beside what it gives.
constexpr size_t kPassingRows = 32768;

struct PullShare {
  RequestPtr request;
  wire::TableRef asked;
  std::vector<int64_t> keys;
  std::vector<uint32_t> positions;  // among all that are pulled
};

// Takes in the rows of some of the keys, which stand at `positions` of all.
using TakeRows = std::function<void(std::span<const int64_t> keys,
                                    std::span<const uint32_t> positions, const float* rows)>;

uint64_t rows_in(uint64_t size_bytes, const wire::TableSpec& spec) {
  const uint64_t row_bytes = spec.dim * sizeof(float) + sizeof(int64_t);
  return std::max<uint64_t>(size_bytes / row_bytes, 1);
}

// In the order of keys.
void sort_share(PullShare* share) {
  if (wire::increase(share->keys)) return;
  const std::vector<uint32_t> order = wire::order_of(share->keys);
  const auto keys = share->keys;
  const auto positions = share->positions;
  for (size_t i = 0; i < order.size(); ++i) {
    share->keys[i] = keys[order[i]];
    share->positions[i] = positions[order[i]];
  }
}

// kPassing: a lookup that no gradient follows.
enum class Purpose { kLookup, kPassing, kFlush, kReading };

// The table's mutex is held. For a flush and for reading they come as the servers have them,
// whatever the dtype of pulls.
void pull_rows(Shared& shared, SetState& set, uint32_t table, std::span<const int64_t> keys,
               Purpose purpose, const TakeRows& take) {
  const bool for_gradient = purpose == Purpose::kLookup || purpose == Purpose::kFlush;
  const bool averages = set.reads_averages;
  const bool exact = averages || purpose == Purpose::kFlush || purpose == Purpose::kReading;
  const uint64_t step = averages || for_gradient ? set.step_of_pull() : 0;
  Session& session = shared.session;
  TableCache& cache = set.table(table);
  cache.split().run(keys);
  std::vector<PullShare> shares;
  std::vector<RequestPtr> requests;
  for (const uint32_t s : session.send_order()) {
    const auto positions = cache.split().positions(s);
    if (positions.empty()) continue;
    PullShare share;
    share.asked.table = table;
    share.asked.row_count = positions.size();
    share.asked.dim = cache.spec().dim;
    share.keys.resize(positions.size());
    kernels::gather_rows(keys.data(), sizeof(int64_t), positions.data(), positions.size(),
                         sizeof(int64_t), share.keys.data(), sizeof(int64_t));
    share.positions.assign(positions.begin(), positions.end());
    if (is_coded(set, session, s)) sort_share(&share);
    wire::FilledKeys filled = wire::layout_pull({&share.asked, 1}, shared.pool, step);
    std::copy(share.keys.begin(), share.keys.end(), filled.keys[0]);
    Outbound out = code_pull_for(set, session, s, std::move(filled.payload), exact, shared.pool);
    share.request =
        session.send(s, wire::FrameKind::kPullRows, set.id, std::move(out.payload), out.coded);
    requests.push_back(share.request);
    shares.push_back(std::move(share));
  }
  session.wait(requests);
  for (const PullShare& share : shares) {
    wire::Version version;
    const auto rows = rows_of_reply({&share.asked, 1}, share.request.get(), shared.pool, &version);
    if (for_gradient) set.note_rows(share.request->server, version);
    take(share.keys, share.positions, rows[0].data());
  }
  shared.rows_pulled += keys.size();
}

// Into the cache, in chunks.
void pull_into(Shared& shared, SetState& set, uint32_t table, std::span<const int64_t> keys,
               Purpose purpose) {
  TableCache& cache = set.table(table);
  const uint64_t chunk = rows_in(kPullBytes, cache.spec());
  for (size_t begin = 0; begin < keys.size(); begin += chunk) {
    const size_t size = std::min<size_t>(chunk, keys.size() - begin);
    pull_rows(shared, set, table, keys.subspan(begin, size), purpose,
              [&](auto some, auto positions, const float* rows) {
                if (purpose == Purpose::kLookup) {
                  cache.take_in(begin, some, positions, rows);
                } else {
                  cache.overwrite(some, rows);
                }
              });
  }
}

// The table's mutex is held.
template <typename Id>
void bring(Shared& shared, SetState& set, Prefetcher& prefetcher, uint32_t table,
           std::span<const Id> ids) {
  TableCache& cache = set.table(table);
  // Others go on while this trainer is outside of rounds: what it has may be old at any time.
  if (!set.member) cache.refresh();
  prefetcher.resolve(table, ids);
  const auto missing = cache.take_missing(ids);
  const uint64_t hits = cache.take_hits();
  shared.prefetch_hits += hits;
  if (hits > 0) prefetcher.note_hits();
  try {
    pull_into(shared, set, table, missing, Purpose::kLookup);
  } catch (...) {
    cache.forget(missing);
    throw;
  }
}

// Rows of a remote table that leave nothing behind. The table's mutex is held.
template <typename Id>
void pass_through(Shared& shared, SetState& set, uint32_t table, std::span<const Id> ids,
                  float* out) {
  TableCache& cache = set.table(table);
  cache.check_ids(ids);
  if (!set.member) cache.refresh();
  const size_t dim = cache.spec().dim;
  kernels::KeyDeduper deduper;
  std::vector<int64_t> unique;
  std::vector<uint32_t> inverse;
  std::vector<int64_t> missing;
  std::vector<uint32_t> missing_at;  // among the distinct ones
  std::vector<const float*> rows;    // of the distinct ones
  std::vector<const void*> of_ids;
  std::vector<float> pulled;
  for (size_t begin = 0; begin < ids.size(); begin += kPassingRows) {
    const size_t n = std::min(kPassingRows, ids.size() - begin);
    unique.resize(n);
    inverse.resize(n);
    unique.resize(deduper.run(ids.data() + begin, n, unique.data(), inverse.data()));
    rows.resize(unique.size());
    missing.clear();
    missing_at.clear();
    for (uint32_t i = 0; i < unique.size(); ++i) {
      rows[i] = cache.find_row(unique[i]);
      if (rows[i] != nullptr) continue;
      missing.push_back(unique[i]);
      missing_at.push_back(i);
    }
    pulled.resize(missing.size() * dim);
    pull_rows(shared, set, table, missing, Purpose::kPassing,
              [&](auto, auto positions, const float* values) {
                kernels::scatter_rows(pulled.data(), dim * sizeof(float), positions.data(),
                                      positions.size(), dim * sizeof(float), values,
                                      dim * sizeof(float));
              });
    for (size_t i = 0; i < missing.size(); ++i) rows[missing_at[i]] = pulled.data() + i * dim;
    of_ids.resize(n);
    for (size_t i = 0; i < n; ++i) of_ids[i] = rows[inverse[i]];
    kernels::gather_pointers(of_ids.data(), n, dim * sizeof(float), out + begin * dim,
                             dim * sizeof(float));
  }
}

}  // namespace

void check_bound(const TableCache& cache) {
  if (cache.bound()) return;
  throw Error(ErrorCode::kInvalidArgument,
              "table '" + cache.spec().name + "': bind_table was not called before a pull");
}

void look_up(Shared& shared, SetState& set, Prefetcher& prefetcher, const ComingIds& ids) {
  TableCache& cache = set.table(ids.table);
  const std::lock_guard lock(cache.mutex);
  check_bound(cache);
  with_ids(ids, [&](auto wanted) { bring(shared, set, prefetcher, ids.table, wanted); });
  cache.keep_budget();
}

void look_up_into(Shared& shared, SetState& set, Prefetcher& prefetcher, const ComingIds& ids,
                  float* out, bool keep) {
  TableCache& cache = set.table(ids.table);
  const std::lock_guard lock(cache.mutex);
  check_bound(cache);
  with_ids(ids, [&](auto wanted) {
    if (cache.remote() && !keep) return pass_through(shared, set, ids.table, wanted, out);
    bring(shared, set, prefetcher, ids.table, wanted);
    cache.gather(wanted, out);
    cache.keep_budget();
  });
}

void read_rows(Shared& shared, SetState& set, uint32_t table, std::span<const int64_t> keys) {
  TableCache& cache = set.table(table);
  const std::lock_guard lock(cache.mutex);
  check_bound(cache);
  if (cache.remote()) {
    throw Error(ErrorCode::kInvalidArgument,
                "table '" + cache.spec().name +
                    "' is remote: there is no weight here to read rows into; look them up");
  }
  const std::vector<int64_t> stale = cache.stale(keys, !set.member || is_lossy(set.layout));
  pull_into(shared, set, table, stale, Purpose::kReading);
}

void pull_all_rows(Shared& shared, SetState& set) {
  for (uint32_t t = 0; t < set.tables.size(); ++t) {
    TableCache& cache = set.table(t);
    if (cache.remote()) continue;
    const std::lock_guard lock(cache.mutex);
    check_bound(cache);
    // What a lookup has brought may be rounded.
    if (!set.member || is_lossy(set.layout)) cache.refresh();
    const uint64_t chunk = rows_in(kChunkBytes, cache.spec()) * set.server_count;
    std::vector<int64_t> keys;
    for (uint64_t begin = 0; begin < cache.spec().rows; begin += chunk) {
      keys.resize(std::min(chunk, cache.spec().rows - begin));
      std::iota(keys.begin(), keys.end(), static_cast<int64_t>(begin));
      const auto missing = cache.take_missing(std::span<const int64_t>(keys));
      try {
        pull_into(shared, set, t, missing, Purpose::kFlush);
      } catch (...) {
        cache.forget(missing);
        throw;
      }
    }
  }
}

void pull_dense(Shared& shared, SetState& set, std::span<void* const> weights) {
  Session& session = shared.session;
  if (weights.size() < set.parameter_count) {
    throw Error(ErrorCode::kInvalidArgument,
                "pull_dense: addresses of " + std::to_string(weights.size()) +
                    " dense parameters, expected " + std::to_string(set.parameter_count));
  }
  set.dense_stale = false;
  std::vector<RequestPtr> requests;
  for (uint32_t s = 0; s < set.server_count; ++s) {
    if (set.shard_blocks[s].empty()) continue;
    Outbound out = pull_dense_from(set, session, s, true);
    requests.push_back(
        session.send(s, wire::FrameKind::kPullDense, set.id, std::move(out.payload), out.coded));
  }
  try {
    session.wait(requests);
  } catch (const Error&) {
    set.dense_stale = true;
    throw;
  }
  for (const RequestPtr& request : requests) {
    decode_reply(set, wire::SectionKind::kDense, request.get(), shared.pool);
    set.note_dense(request->server, unpack_dense(set, request->reply, weights));
  }
}

}  // namespace cpudist::client
