// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows and dense blocks from the servers into the trainer's weights.
#include <algorithm>
#include <numeric>

#include "client/client_impl.h"
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

}  // namespace

void Client::Impl::settle() {
  if (!has_unfinished) return;
  const std::lock_guard lock(sequenced_mutex);
  finish_unfinished();
}

// The table's mutex is held.
void Client::Impl::pull_rows(ClientSet& set, uint32_t table, std::span<const int64_t> keys,
                             bool exact) {
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
    wire::FilledKeys filled = wire::layout_pull({&share.asked, 1}, pool, set.step_of_pull());
    std::copy(share.keys.begin(), share.keys.end(), filled.keys[0]);
    Outbound out = code_pull_for(set, session, s, std::move(filled.payload), exact, pool);
    share.request =
        session.send(s, wire::FrameKind::kPullRows, set.id, std::move(out.payload), out.coded);
    requests.push_back(share.request);
    shares.push_back(std::move(share));
  }
  session.wait(requests);
  for (const PullShare& share : shares) {
    wire::Version version;
    const auto rows = rows_of_reply({&share.asked, 1}, share.request.get(), pool, &version);
    set.note_rows(share.request->server, version);
    kernels::scatter_rows(cache.weight(), row_bytes, share.keys.data(), share.keys.size(),
                          row_bytes, rows[0].data(), row_bytes);
  }
  rows_pulled += keys.size();
}

void Client::Impl::pull_dense(ClientSet& set, std::span<void* const> weights) {
  if (weights.size() < set.parameter_count) {
    throw Error(ErrorCode::kInvalidArgument,
                "pull_dense: addresses of " + std::to_string(weights.size()) +
                    " dense parameters, expected " + std::to_string(set.parameter_count));
  }
  set.dense_stale = false;
  std::vector<RequestPtr> requests;
  for (uint32_t s = 0; s < server_count(); ++s) {
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
    decode_reply(set, request.get(), pool);
    set.note_dense(request->server, unpack_dense(set, request->reply, weights));
  }
}

void Client::bind_table(uint32_t param_set, uint32_t table, float* weight) {
  const ClientSetPtr set = impl_->find(param_set);
  TableCache& cache = set->table(table);
  set->prefetcher.drop_all(*set, impl_->session);  // what is held is in the old one
  const std::lock_guard lock(cache.mutex);
  cache.bind(weight);
}

namespace {

void check_bound(const TableCache& cache) {
  if (cache.bound()) return;
  throw Error(ErrorCode::kInvalidArgument,
              "table '" + cache.spec().name + "': bind_table was not called before a pull");
}

}  // namespace

void Client::pull(uint32_t param_set, uint32_t table, const void* ids, uint64_t count,
                  bool ids_are_int32) {
  impl_->settle();
  const ClientSetPtr set = impl_->find(param_set);
  TableCache& cache = set->table(table);
  const std::lock_guard lock(cache.mutex);
  check_bound(cache);
  // Others go on while this trainer is outside of rounds: what it has may be old at any time.
  if (!set->member) cache.refresh();
  const auto take_missing = [&](auto wanted) {
    set->prefetcher.resolve(*set, impl_->session, table, wanted);
    return cache.take_missing(wanted);
  };
  const size_t n = count;
  const auto missing = ids_are_int32 ? take_missing(std::span(static_cast<const int32_t*>(ids), n))
                                     : take_missing(std::span(static_cast<const int64_t*>(ids), n));
  const uint64_t hits = cache.take_hits();
  impl_->prefetch_hits += hits;
  if (hits > 0) set->prefetcher.note_hits(*set);
  const uint64_t chunk = rows_in(kPullBytes, cache.spec());
  try {
    for (size_t begin = 0; begin < missing.size(); begin += chunk) {
      const size_t size = std::min<size_t>(chunk, missing.size() - begin);
      impl_->pull_rows(*set, table, missing.subspan(begin, size), false);
    }
  } catch (...) {
    cache.forget(missing);
    throw;
  }
}

uint64_t Client::prefetch(uint32_t param_set, std::span<const ComingIds> ids, bool managed) {
  const ClientSetPtr set = impl_->find(param_set);
  for (const ComingIds& one : ids) check_bound(set->table(one.table));
  if (set->layout.max_staleness != wire::kAnyStaleness) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "prefetch: rows read before a step would be older at the next one than max_staleness "
        "promises to the servers. Train without prefetch, or without max_staleness");
  }
  // What an interrupted step leaves is for the next call that may wait.
  if (!set->member || impl_->has_unfinished) return 0;
  uint64_t rows = 0;
  const uint64_t number =
      set->prefetcher.request(*set, impl_->session, impl_->pool, ids, managed, &rows);
  impl_->rows_prefetched += rows;
  return number;
}

void Client::use_prefetched(uint32_t param_set, uint64_t number) {
  impl_->find(param_set)->prefetcher.use(number);
}

void Client::drop_prefetched(uint32_t param_set) {
  const ClientSetPtr set = impl_->find(param_set);
  set->prefetcher.drop_all(*set, impl_->session);
}

void Client::pull_all_rows(uint32_t param_set) {
  impl_->settle();
  const ClientSetPtr set = impl_->find(param_set);
  set->prefetcher.drop_all(*set, impl_->session);
  for (uint32_t t = 0; t < set->tables.size(); ++t) {
    TableCache& cache = set->table(t);
    const std::lock_guard lock(cache.mutex);
    check_bound(cache);
    // What a lookup has brought may be rounded.
    if (!set->member || is_lossy(set->layout)) cache.refresh();
    const uint64_t chunk = rows_in(kChunkBytes, cache.spec()) * impl_->server_count();
    std::vector<int64_t> keys;
    for (uint64_t begin = 0; begin < cache.spec().rows; begin += chunk) {
      keys.resize(std::min(chunk, cache.spec().rows - begin));
      std::iota(keys.begin(), keys.end(), static_cast<int64_t>(begin));
      const auto missing = cache.take_missing(std::span<const int64_t>(keys));
      try {
        if (!missing.empty()) impl_->pull_rows(*set, t, missing, true);
      } catch (...) {
        cache.forget(missing);
        throw;
      }
    }
  }
}

void Client::pull_dense(uint32_t param_set, std::span<void* const> weights) {
  impl_->settle();
  const ClientSetPtr set = impl_->find(param_set);
  impl_->pull_dense(*set, weights);
}

}  // namespace cpudist::client
