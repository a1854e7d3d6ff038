// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows and dense blocks from the servers into the trainer's weights.
#include "client/values/pull.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "client/push/coding.h"
#include "client/push/packing.h"
#include "kernels/gather_scatter.h"

namespace cpudist::client {

namespace {

// Rows of one lookup that travel in one reply; far above a batch, far below a frame's limit.
constexpr uint64_t kPullBytes = 256ull << 20;

struct PullShare {
  RequestPtr request;
  wire::TableRef asked;
  std::vector<int64_t> keys;
};

uint64_t rows_in(uint64_t size_bytes, const wire::TableSpec& spec) {
  const uint64_t row_bytes = spec.dim * sizeof(float) + sizeof(int64_t);
  return std::max<uint64_t>(size_bytes / row_bytes, 1);
}

enum class Purpose { kLookup, kFlush, kReading };

// The table's mutex is held. For a flush and for reading they come as the servers have them,
// whatever the dtype of pulls.
void pull_rows(Shared& shared, SetState& set, uint32_t table, std::span<const int64_t> keys,
               Purpose purpose) {
  const bool for_gradient = purpose != Purpose::kReading;
  const bool averages = set.reads_averages;
  const bool exact = averages || purpose != Purpose::kLookup;
  const uint64_t step = averages || for_gradient ? set.step_of_pull() : 0;
  Session& session = shared.session;
  TableCache& cache = set.table(table);
  const size_t row_bytes = cache.spec().dim * sizeof(float);
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
    if (is_coded(set, session, s)) wire::sort_keys(share.keys);
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
    kernels::scatter_rows(cache.weight(), row_bytes, share.keys.data(), share.keys.size(),
                          row_bytes, rows[0].data(), row_bytes);
  }
  shared.rows_pulled += keys.size();
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
  // Others go on while this trainer is outside of rounds: what it has may be old at any time.
  if (!set.member) cache.refresh();
  const auto take_missing = [&](auto wanted) {
    prefetcher.resolve(ids.table, wanted);
    return cache.take_missing(wanted);
  };
  const size_t n = ids.count;
  const auto missing = ids.are_int32
                           ? take_missing(std::span(static_cast<const int32_t*>(ids.ids), n))
                           : take_missing(std::span(static_cast<const int64_t*>(ids.ids), n));
  const uint64_t hits = cache.take_hits();
  shared.prefetch_hits += hits;
  if (hits > 0) prefetcher.note_hits();
  const uint64_t chunk = rows_in(kPullBytes, cache.spec());
  try {
    for (size_t begin = 0; begin < missing.size(); begin += chunk) {
      const size_t size = std::min<size_t>(chunk, missing.size() - begin);
      pull_rows(shared, set, ids.table, missing.subspan(begin, size), Purpose::kLookup);
    }
  } catch (...) {
    cache.forget(missing);
    throw;
  }
}

void read_rows(Shared& shared, SetState& set, uint32_t table, std::span<const int64_t> keys) {
  TableCache& cache = set.table(table);
  const std::lock_guard lock(cache.mutex);
  check_bound(cache);
  const std::vector<int64_t> stale = cache.stale(keys, !set.member || is_lossy(set.layout));
  const uint64_t chunk = rows_in(kPullBytes, cache.spec());
  for (size_t begin = 0; begin < stale.size(); begin += chunk) {
    const size_t size = std::min<size_t>(chunk, stale.size() - begin);
    pull_rows(shared, set, table, std::span(stale).subspan(begin, size), Purpose::kReading);
  }
}

void pull_all_rows(Shared& shared, SetState& set) {
  for (uint32_t t = 0; t < set.tables.size(); ++t) {
    TableCache& cache = set.table(t);
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
        if (!missing.empty()) pull_rows(shared, set, t, missing, Purpose::kFlush);
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
