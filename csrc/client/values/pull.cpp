// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// long: every way in which rows come: looked up, foreseen, passed through, read, flushed.
// Rows and dense blocks from the servers into the trainer's weights.
#include "client/values/pull.h"

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
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

// Takes in the rows of some of the keys, which stand at `positions` of all.
using TakeRows = std::function<void(std::span<const int64_t> keys,
                                    std::span<const uint32_t> positions, const float* rows)>;

// Distinct keys of one table.
struct WantedRows {
  uint32_t table = 0;
  std::span<const int64_t> keys;
  TakeRows take;
};

// Those of them that one server owns.
struct PullPart {
  const WantedRows* wanted = nullptr;
  std::span<const int64_t> keys;
  std::span<const uint32_t> positions;  // among all that are wanted
  // What these two are of, where it is neither what is wanted nor how that was split.
  std::vector<int64_t> own_keys;
  std::vector<uint32_t> own_positions;
};

struct PullShare {
  RequestPtr request;  // null: the server owns none
  std::vector<wire::TableRef> asked;
  std::vector<PullPart> parts;
};

uint64_t rows_in(uint64_t size_bytes, const wire::TableSpec& spec) {
  const uint64_t row_bytes = spec.dim * sizeof(float) + sizeof(int64_t);
  return std::max<uint64_t>(size_bytes / row_bytes, 1);
}

// In the order of keys.
void sort_part(PullPart* part) {
  if (wire::increase(part->keys)) return;
  const std::vector<uint32_t> order = wire::order_of(part->keys);
  std::vector<int64_t> keys(order.size());
  std::vector<uint32_t> positions(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    keys[i] = part->keys[order[i]];
    positions[i] = part->positions[order[i]];
  }
  part->own_keys = std::move(keys);
  part->own_positions = std::move(positions);
  part->keys = part->own_keys;
  part->positions = part->own_positions;
}

// kPassing: a lookup that no gradient follows.
enum class Purpose { kLookup, kPassing, kFlush, kReading };

// What goes to one server. The keys of every table are split.
PullShare send_share(Shared& shared, SetState& set, std::span<const WantedRows> wanted, uint32_t s,
                     bool exact, uint64_t step) {
  PullShare share;
  const bool coded = is_coded(set, shared.session, s);
  for (const WantedRows& one : wanted) {
    const auto positions = set.table(one.table).split().positions(s);
    if (positions.empty()) continue;
    share.asked.push_back(set.ref_of(one.table, positions.size()));
    PullPart& part = share.parts.emplace_back();
    part.wanted = &one;
    part.positions = positions;
    if (positions.size() == one.keys.size()) {  // all of them, in their order
      part.keys = one.keys;
    } else {
      part.own_keys.resize(positions.size());
      kernels::gather_rows(one.keys.data(), sizeof(int64_t), positions.data(), positions.size(),
                           sizeof(int64_t), part.own_keys.data(), sizeof(int64_t));
      part.keys = part.own_keys;
    }
    if (coded) sort_part(&part);
  }
  if (share.parts.empty()) return share;
  wire::FilledKeys filled = wire::layout_pull(share.asked, shared.pool, step);
  for (size_t i = 0; i < share.parts.size(); ++i) {
    std::copy(share.parts[i].keys.begin(), share.parts[i].keys.end(), filled.keys[i]);
  }
  Outbound out = code_pull_for(set, shared.session, s, std::move(filled.payload), share.asked,
                               exact, shared.pool);
  share.request =
      shared.session.send(s, wire::FrameKind::kPullRows, set.id, std::move(out.payload), out.coded);
  return share;
}

// The tables, each named once, have their mutexes held. For a flush and for reading rows come as
// the servers have them, whatever the dtype of pulls.
void pull_rows(Shared& shared, SetState& set, std::span<const WantedRows> wanted, Purpose purpose) {
  const bool for_gradient = purpose == Purpose::kLookup || purpose == Purpose::kFlush;
  const bool averages = set.reads_averages;
  const bool exact = averages || purpose == Purpose::kFlush || purpose == Purpose::kReading;
  const uint64_t step = averages || for_gradient ? set.step_of_pull() : 0;
  for (const WantedRows& one : wanted) set.table(one.table).split().run(one.keys);
  std::vector<PullShare> shares;
  std::vector<RequestPtr> requests;
  for (const uint32_t s : shared.session.send_order()) {
    PullShare share = send_share(shared, set, wanted, s, exact, step);
    if (!share.request) continue;
    requests.push_back(share.request);
    shares.push_back(std::move(share));
  }
  shared.session.wait(requests);
  for (const PullShare& share : shares) {
    wire::Version version;
    const auto rows = rows_of_reply(set, share.asked, share.request.get(), shared.pool, &version);
    if (for_gradient) set.note_rows(share.request->server, version);
    for (size_t i = 0; i < share.parts.size(); ++i) {
      const PullPart& part = share.parts[i];
      part.wanted->take(part.keys, part.positions, rows[i].data());
    }
  }
  for (const WantedRows& one : wanted) shared.rows_pulled += one.keys.size();
}

// `size` of the keys from `begin` on, into the cache.
WantedRows into_cache(TableCache& cache, uint32_t table, std::span<const int64_t> keys,
                      size_t begin, size_t size, Purpose purpose) {
  return {table, keys.subspan(begin, size),
          [&cache, begin, purpose](auto some, auto positions, const float* rows) {
            if (purpose == Purpose::kLookup) {
              cache.take_in(begin, some, positions, rows);
            } else {
              cache.overwrite(some, rows);
            }
          }};
}

// Into the cache, in chunks.
void pull_into(Shared& shared, SetState& set, uint32_t table, std::span<const int64_t> keys,
               Purpose purpose) {
  TableCache& cache = set.table(table);
  const uint64_t chunk = rows_in(kPullBytes, cache.spec());
  for (size_t begin = 0; begin < keys.size(); begin += chunk) {
    const size_t size = std::min<size_t>(chunk, keys.size() - begin);
    const WantedRows one = into_cache(cache, table, keys, begin, size, purpose);
    pull_rows(shared, set, {&one, 1}, purpose);
  }
}

// Rows of a batch to come that are here by now.
void count_hits(Shared& shared, Prefetcher& prefetcher, TableCache& cache) {
  const uint64_t hits = cache.take_hits();
  shared.prefetch_hits += hits;
  if (hits > 0) prefetcher.note_hits();
}

// The table's mutex is held. Returns how many rows were pulled.
template <typename Id>
uint64_t bring(Shared& shared, SetState& set, Prefetcher& prefetcher, uint32_t table,
               std::span<const Id> ids) {
  TableCache& cache = set.table(table);
  // Others go on while this trainer is outside of rounds: what it has may be old at any time.
  if (!set.member) cache.refresh();
  prefetcher.resolve(table, ids);
  const auto missing = cache.take_missing(ids);
  count_hits(shared, prefetcher, cache);
  try {
    pull_into(shared, set, table, missing, Purpose::kLookup);
  } catch (...) {
    cache.forget(missing);
    throw;
  }
  return missing.size();
}

// Whether these are 0, 1, 2, ...
bool count_up(std::span<const uint32_t> positions) {
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] != i) return false;
  }
  return true;
}

// The rows of `rows.unique` from the servers to those of the ids, which `rows.inverse` tells.
void pass_pulled(Shared& shared, SetState& set, uint32_t table, const PassingRows& rows,
                 float* out) {
  const size_t row_bytes = set.table(table).spec().dim * sizeof(float);
  const size_t count = rows.inverse.size();
  Buffer collected;  // what comes from several servers, or in another order
  const auto give = [&](const void* values) {
    kernels::gather_rows(values, row_bytes, rows.inverse.data(), count, row_bytes, out, row_bytes);
  };
  const WantedRows wanted{table, rows.unique, [&](auto some, auto positions, const float* values) {
                            if (some.size() == rows.unique.size() && count_up(positions))
                              return give(values);
                            if (collected.empty())
                              collected = Buffer(rows.unique.size() * row_bytes, shared.pool);
                            kernels::scatter_rows(collected.data(), row_bytes, positions.data(),
                                                  positions.size(), row_bytes, values, row_bytes);
                          }};
  pull_rows(shared, set, {&wanted, 1}, Purpose::kPassing);
  if (!collected.empty()) give(collected.data());
}

// The same where some values may be here. Returns how many were not.
uint64_t pass_some_pulled(Shared& shared, SetState& set, uint32_t table, PassingRows* rows,
                          float* out) {
  const TableCache& cache = set.table(table);
  const size_t row_bytes = cache.spec().dim * sizeof(float);
  rows->rows.resize(rows->unique.size());
  rows->missing.clear();
  rows->missing_at.clear();
  for (uint32_t i = 0; i < rows->unique.size(); ++i) {
    rows->rows[i] = cache.find_value(rows->unique[i]);
    if (rows->rows[i] != nullptr) continue;
    rows->missing.push_back(rows->unique[i]);
    rows->missing_at.push_back(i);
  }
  Buffer pulled;
  if (!rows->missing.empty()) {
    pulled = Buffer(rows->missing.size() * row_bytes, shared.pool);
    const WantedRows wanted{table, rows->missing, [&](auto, auto positions, const float* values) {
                              kernels::scatter_rows(pulled.data(), row_bytes, positions.data(),
                                                    positions.size(), row_bytes, values, row_bytes);
                            }};
    pull_rows(shared, set, {&wanted, 1}, Purpose::kPassing);
  }
  for (size_t i = 0; i < rows->missing.size(); ++i) {
    rows->rows[rows->missing_at[i]] = reinterpret_cast<const float*>(pulled.data() + i * row_bytes);
  }
  const size_t count = rows->inverse.size();
  rows->of_ids.resize(count);
  for (size_t i = 0; i < count; ++i) rows->of_ids[i] = rows->rows[rows->inverse[i]];
  kernels::gather_pointers(rows->of_ids.data(), count, row_bytes, out, row_bytes);
  return rows->missing.size();
}

// Rows of a remote table that leave nothing behind. The table's mutex is held.
template <typename Id>
uint64_t pass_through(Shared& shared, SetState& set, uint32_t table, std::span<const Id> ids,
                      float* out) {
  TableCache& cache = set.table(table);
  cache.require_marks();
  cache.check_ids(ids);
  if (!set.member) cache.refresh();
  PassingRows own;
  const std::unique_lock lock(set.passing.mutex, std::try_to_lock);
  PassingRows& rows = lock.owns_lock() ? set.passing.rows : own;
  uint64_t count = 0;
  const size_t chunk = std::min<size_t>(kPassingRows, rows_in(kPullBytes, cache.spec()));
  for (size_t begin = 0; begin < ids.size(); begin += chunk) {
    const size_t n = std::min(chunk, ids.size() - begin);
    rows.unique.resize(n);
    rows.inverse.resize(n);
    rows.unique.resize(
        rows.deduper.run(ids.data() + begin, n, rows.unique.data(), rows.inverse.data()));
    float* const target = out + begin * cache.spec().dim;
    if (cache.has_values()) {
      count += pass_some_pulled(shared, set, table, &rows, target);
    } else {
      pass_pulled(shared, set, table, rows, target);
      count += rows.unique.size();
    }
  }
  return count;
}

// What lookups of one table are likely to want. The table's mutex is held.
class GuessedRows {
 public:
  GuessedRows(uint32_t table, TableCache& cache) : table_(table), cache_(cache) {}
  // Adds the ids of guess `number`, unless one is no row.
  void add(const GuessedIds& guess, size_t number) {
    if (!read_ids(guess, &some_)) return;
    try {
      cache_.check_ids(std::span<const int64_t>(some_));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kRowOutOfRange) throw;
      return;
    }
    ids_.insert(ids_.end(), some_.begin(), some_.end());
    ends_.emplace_back(number, ids_.size());
  }
  // Whether a remote table's rows would be dropped again for memory, before they are looked up.
  bool is_too_much(const CacheBudget& budget) const {
    const uint64_t bytes = ids_.size() * cache_.spec().dim * sizeof(float);
    return cache_.remote() && budget.used_bytes + bytes > budget.limit_bytes;
  }
  // Marks what is to be pulled as current, and counts it by guess.
  void take(Shared& shared, Prefetcher& prefetcher, std::vector<uint64_t>* counts) {
    const std::span<const int64_t> ids(ids_);
    prefetcher.resolve(table_, ids);
    missing_ = cache_.take_missing(ids);
    count_hits(shared, prefetcher, cache_);
    // They stand in the order in which they are first named.
    size_t next = 0;
    size_t at = 0;
    for (const auto& [number, end] : ends_) {
      const size_t before = next;
      for (; at < end; ++at)
        next += static_cast<size_t>(next < missing_.size() && ids[at] == missing_[next]);
      (*counts)[number] = next - before;
    }
  }
  void forget() { cache_.forget(missing_); }
  // Adds what is to be pulled; what would be too much for one reply is pulled at once.
  void want(Shared& shared, SetState& set, std::vector<WantedRows>* wanted, uint64_t* bytes) {
    const uint64_t chunk = rows_in(kPullBytes, cache_.spec());
    for (size_t begin = 0; begin < missing_.size(); begin += chunk) {
      const size_t size = std::min<size_t>(chunk, missing_.size() - begin);
      const uint64_t more = size * cache_.spec().dim * sizeof(float);
      if (begin > 0 || *bytes + more > kPullBytes) {
        pull_rows(shared, set, *wanted, Purpose::kLookup);
        wanted->clear();
        *bytes = 0;
      }
      wanted->push_back(into_cache(cache_, table_, missing_, begin, size, Purpose::kLookup));
      *bytes += more;
    }
  }

 private:
  uint32_t table_;
  TableCache& cache_;
  std::vector<int64_t> some_;
  std::vector<int64_t> ids_;
  std::vector<std::pair<size_t, size_t>> ends_;  // guess, and where its ids end
  std::span<const int64_t> missing_;
};

}  // namespace

void check_bound(const TableCache& cache) {
  if (cache.bound()) return;
  throw Error(ErrorCode::kInvalidArgument,
              "table '" + cache.spec().name + "': bind_table was not called before a pull");
}

uint64_t look_up(Shared& shared, SetState& set, Prefetcher& prefetcher, const ComingIds& ids) {
  TableCache& cache = set.table(ids.table);
  const std::lock_guard lock(cache.mutex);
  check_bound(cache);
  uint64_t pulled = 0;
  with_ids(ids, [&](auto wanted) { pulled = bring(shared, set, prefetcher, ids.table, wanted); });
  cache.keep_budget();
  return pulled;
}

uint64_t look_up_into(Shared& shared, SetState& set, Prefetcher& prefetcher, const ComingIds& ids,
                      float* out, bool keep) {
  TableCache& cache = set.table(ids.table);
  const std::lock_guard lock(cache.mutex);
  check_bound(cache);
  uint64_t pulled = 0;
  with_ids(ids, [&](auto wanted) {
    if (cache.remote() && !keep) {
      pulled = pass_through(shared, set, ids.table, wanted, out);
      return;
    }
    pulled = bring(shared, set, prefetcher, ids.table, wanted);
    cache.gather(wanted, out);
    cache.keep_budget();
  });
  return pulled;
}

std::vector<uint64_t> pull_together(Shared& shared, SetState& set, Prefetcher& prefetcher,
                                    std::span<const GuessedIds> guesses) {
  std::vector<uint64_t> counts(guesses.size());
  // Outside of rounds a lookup asks anew in any case.
  if (!set.member) return counts;
  std::map<uint32_t, std::vector<size_t>> by_table;
  for (size_t i = 0; i < guesses.size(); ++i) {
    if (set.table(guesses[i].table).bound()) by_table[guesses[i].table].push_back(i);
  }
  // In the order in which a push takes them, and held until the rows are there.
  std::vector<std::unique_lock<std::mutex>> locks;
  std::vector<GuessedRows> tables;
  tables.reserve(by_table.size());
  try {
    for (const auto& [table, numbers] : by_table) {
      TableCache& cache = set.table(table);
      locks.emplace_back(cache.mutex);
      GuessedRows& rows = tables.emplace_back(table, cache);
      for (const size_t number : numbers) rows.add(guesses[number], number);
      if (!rows.is_too_much(set.cache_budget)) rows.take(shared, prefetcher, &counts);
    }
    std::vector<WantedRows> wanted;
    uint64_t bytes = 0;
    for (GuessedRows& rows : tables) rows.want(shared, set, &wanted, &bytes);
    if (!wanted.empty()) pull_rows(shared, set, wanted, Purpose::kLookup);
  } catch (...) {
    for (GuessedRows& rows : tables) rows.forget();
    throw;
  }
  return counts;
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

void fetch_rows(Shared& shared, SetState& set, uint32_t table, std::span<const int64_t> keys,
                float* out) {
  TableCache& cache = set.table(table);
  const std::lock_guard lock(cache.mutex);
  cache.require_marks();
  cache.check_ids(keys);
  const size_t row_bytes = cache.spec().dim * sizeof(float);
  const uint64_t chunk = rows_in(kPullBytes, cache.spec());
  for (size_t begin = 0; begin < keys.size(); begin += chunk) {
    const size_t size = std::min<size_t>(chunk, keys.size() - begin);
    float* const target = out + begin * cache.spec().dim;
    const WantedRows wanted{table, keys.subspan(begin, size),
                            [&](auto, auto positions, const float* rows) {
                              kernels::scatter_rows(target, row_bytes, positions.data(),
                                                    positions.size(), row_bytes, rows, row_bytes);
                            }};
    pull_rows(shared, set, {&wanted, 1}, Purpose::kReading);
  }
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
