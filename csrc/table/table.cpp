// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one class
//
// Lookups and insertions run in small batches: all hashes first, then all slots, then all records,
// so that the memory system works on many rows at once.

#include "table/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <set>
#include <string>
#include <utility>

#include "base/errors.h"
#include "kernels/gather_scatter.h"

namespace cpudist::table {
namespace {

// Page walks are what a large table waits for: many must be asked for before one is waited for.
constexpr size_t kBatch = 256;
// Fewer where nothing but values is read: these are to be in the nearest cache until they are
// copied.
constexpr size_t kGathered = 64;
static_assert(kGathered <= kBatch);
// Of rows that are too many one goes of so many that were looked at.
constexpr uint64_t kLookAt = 8;
// More rows than this get their part of the index as they come: about 3 GiB of slots.
constexpr uint64_t kMostMade = uint64_t{1} << 28;

constexpr uint64_t kOpenRows = uint64_t{1} << 54;  // of which nobody knows how many there will be

// How many rows all servers will have at most.
uint64_t all_rows(const wire::TableSpec& spec) {
  uint64_t rows = spec.open ? kOpenRows : spec.rows;
  if (spec.max_rows != 0) rows = std::min(rows, spec.max_rows);
  return rows;
}

// Rows of the table that this server will probably own at most.
uint64_t likely_rows(const wire::TableSpec& spec, uint32_t server_count) {
  const double share = static_cast<double>(all_rows(spec)) / server_count;
  return static_cast<uint64_t>(share + 4.0 * std::sqrt(share) + 16.0);
}

// What of a bound of all servers is one's, who has so many buckets; rounded up.
uint64_t share_of(uint64_t bound, uint64_t buckets) {
  const uint64_t whole = bound / kernels::kBucketCount * buckets;
  const uint64_t rest = bound % kernels::kBucketCount * buckets;
  return whole + (rest + kernels::kBucketCount - 1) / kernels::kBucketCount;
}

uint64_t record_bytes(uint64_t elements) {
  return (sizeof(RowHeader) + elements * sizeof(float) + 7) / 8 * 8;
}

uint32_t checked_state_elements(const kernels::OptimizerConfig& config, uint32_t dim) {
  const size_t count = kernels::state_elements(config, dim, dim);
  if (count > std::numeric_limits<uint32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, "a row's optimizer state is too large");
  }
  return static_cast<uint32_t>(count);
}

}  // namespace

Table::Table(uint32_t id, wire::TableSpec spec, const kernels::OptimizerConfig& config,
             uint32_t shard_id, uint32_t server_count, Averaging averaging,
             std::shared_ptr<MemoryAhead> ahead, std::shared_ptr<MemoryCap> cap)
    : id_(id),
      spec_(std::move(spec)),
      config_(config),
      shard_id_(shard_id),
      server_count_(server_count),
      salt_(kernels::table_salt(spec_.name)),
      initial_(wire::initial_rows(spec_)),
      admission_(spec_),
      averaging_(averaging),
      state_elements_(checked_state_elements(config, spec_.dim)),
      likely_rows_(likely_rows(spec_, server_count)),
      unknown_reads_(std::make_unique<std::atomic<uint64_t>>(0)),
      pushed_rows_(std::make_unique<std::array<std::atomic<uint64_t>, kShards>>()),
      kept_(std::make_unique<MemoryCap::Kept>(std::move(cap))),
      slabs_(record_bytes((averaged() ? 2 : 1) * uint64_t{spec_.dim} + state_elements_),
             likely_rows_, std::move(ahead), kept_.get()),
      index_(all_rows(spec_)) {
  divide_buckets();
  eviction_ = Eviction(spec_.eviction, bucket_count_, kernels::kBucketCount);
  kept_->promise(planned_bytes());
  count_index();
}

void Table::divide_buckets() {
  std::vector<uint32_t> owned;
  for (uint32_t bucket = 0; bucket < kernels::kBucketCount; ++bucket) {
    if (wire::owner_of_bucket(bucket, server_count_) == shard_id_) owned.push_back(bucket);
  }
  for (size_t i = 0; i < owned.size(); ++i) {
    shard_of_bucket_[owned[i]] = static_cast<uint8_t>(i * kShards / owned.size());
  }
  if (!owned.empty()) first_bucket_ = owned.front();  // they are a run
  bucket_count_ = owned.size();
  most_rows_ = share_of(spec_.max_rows, bucket_count_);
}

uint64_t Table::size_bytes() const {
  return slabs_.size_bytes() + index_.size_bytes() + admission_.size_bytes();
}

uint64_t Table::planned_bytes() const {
  if (spec_.remote || bucket_count_ == 0) return index_.size_bytes() + admission_.planned_bytes();
  return slabs_.bytes_for(likely_rows_) + index_.size_bytes() +
         index_.growth_bytes(first_bucket_, bucket_count_, likely_rows_);
}

void Table::count_index() noexcept {
  kept_->add(index_.size_bytes() - counted_index_bytes_);
  counted_index_bytes_ = index_.size_bytes();
}

void Table::begin_admission() {
  const uint64_t before = admission_.size_bytes();
  admission_.begin();
  kept_->add(admission_.size_bytes() - before);
}

void Table::check_bound(uint64_t more) const {
  if (most_rows_ == 0 || more == 0) return;
  if (rows_ <= most_rows_ && more <= most_rows_ - rows_) return;
  throw Error(ErrorCode::kTableFull,
              "table " + spec_.name + ": " + std::to_string(more) + " new rows beside the " +
                  std::to_string(rows_) + " on server " + std::to_string(shard_id_) +
                  " are more than its share, " + std::to_string(most_rows_) +
                  ", of max_rows = " + std::to_string(spec_.max_rows) +
                  "; no row was made, and nothing of the update was applied here. Raise max_rows, "
                  "or let old rows make room: eviction=Evict(max_rows=...)");
}

void Table::fill_unknown(std::span<const int64_t> keys, float* out) const {
  if (spec_.unknown_zeros) {
    std::fill_n(out, keys.size() * spec_.dim, 0.0f);
  } else {
    initial_.fill(keys, spec_.dim, out);
  }
}

std::vector<uint64_t> Table::hashes_of(std::span<const int64_t> keys) const {
  std::vector<uint64_t> hashes(keys.size());
  std::transform(keys.begin(), keys.end(), hashes.begin(),
                 [this](int64_t key) { return hash_of(key); });
  return hashes;
}

void Table::find_batch(std::span<const int64_t> keys, uint64_t* hashes, uint32_t* records,
                       size_t prefetched) const {
  const size_t count = keys.size();
  for (size_t i = 0; i < count; ++i) {
    hashes[i] = hash_of(keys[i]);
    index_.prefetch(hashes[i]);
  }
  find_hashed(keys, hashes, records, prefetched);
}

void Table::find_hashed(std::span<const int64_t> keys, const uint64_t* hashes, uint32_t* records,
                        size_t prefetched) const {
  const size_t count = keys.size();
  for (size_t i = 0; i < count; ++i) {
    records[i] = index_.guess(hashes[i]);
    if (records[i] == RowIndex::kNone) continue;
    const uint8_t* begin = record_at(records[i]);
    for (size_t at = 0; at < prefetched; at += kernels::kCacheLineBytes) {
      __builtin_prefetch(begin + at);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    const bool guessed = records[i] == RowIndex::kNone || has_key(records[i], keys[i]);
    if (!guessed) records[i] = find_one(keys[i], hashes[i]);
  }
}

void Table::find(std::span<const int64_t> keys, uint32_t* records, uint8_t* shards) const {
  uint64_t hashes[kBatch];
  for (size_t begin = 0; begin < keys.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, keys.size() - begin);
    find_batch(keys.subspan(begin, count), hashes, records + begin, 1);
    for (size_t i = 0; i < count; ++i) {
      if (records[begin + i] == RowIndex::kNone) require_known(keys[begin + i], hashes[i]);
      if (shards != nullptr) {
        shards[begin + i] = shard_of_bucket_[hashes[i] % kernels::kBucketCount];
      }
    }
  }
}

void Table::gather(std::span<const int64_t> keys, float* out) const {
  uint64_t hashes[kGathered];
  uint32_t records[kGathered];
  const void* rows[kGathered];
  const size_t row_bytes = size_t{spec_.dim} * sizeof(float);
  const size_t read_bytes = sizeof(RowHeader) + row_bytes;
  for (size_t begin = 0; begin < keys.size(); begin += kGathered) {
    const size_t count = std::min(kGathered, keys.size() - begin);
    find_batch(keys.subspan(begin, count), hashes, records, read_bytes);
    size_t known = 0;
    for (size_t i = 0; i < count; ++i) {
      if (records[i] == RowIndex::kNone) {
        require_known(keys[begin + i], hashes[i]);
      } else {
        rows[known++] = weight(records[i]);
      }
    }
    unknown_reads_->fetch_add(count - known, std::memory_order_relaxed);
    float* const target = out + begin * spec_.dim;
    if (known == count) {
      kernels::gather_pointers(rows, count, row_bytes, target, row_bytes);
      continue;
    }
    for (size_t i = 0; i < count; ++i) {
      float* const row = target + i * spec_.dim;
      if (records[i] == RowIndex::kNone) {
        fill_unknown(keys.subspan(begin + i, 1), row);
      } else {
        std::memcpy(row, weight(records[i]), row_bytes);
      }
    }
  }
}

void Table::gather_averages(std::span<const int64_t> keys, uint64_t updates, float* out) const {
  gather(keys, out);  // where a row has no average it is the value
  uint64_t hashes[kBatch];
  uint32_t records[kBatch];
  for (size_t begin = 0; begin < keys.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, keys.size() - begin);
    find_batch(keys.subspan(begin, count), hashes, records, slabs_.stride());
    for (size_t i = 0; i < count; ++i) {
      if (records[i] == RowIndex::kNone || header(records[i]).count == 0) continue;
      float* row = out + (begin + i) * spec_.dim;
      std::memcpy(row, average(records[i]), spec_.dim * sizeof(float));
      draw_average(row, weight(records[i]), spec_.dim,
                   averaging_.power(updates_since(records[i], updates)));
    }
  }
}

uint32_t Table::updates_since(uint32_t record, uint64_t updates) const {
  const auto since =
      static_cast<int32_t>(static_cast<uint32_t>(updates) - header(record).last_seen - 1);
  return static_cast<uint32_t>(std::max(since, 0));
}

void Table::begin_average(uint32_t record) const {
  if (averaged()) std::memcpy(average(record), weight(record), spec_.dim * sizeof(float));
}

void Table::settle_average(uint32_t record, uint64_t round) const {
  // A row without updates has its value for average, however long ago it came.
  const uint32_t missed = header(record).count == 0 ? 0 : updates_since(record, round);
  if (missed == 0) return;
  draw_average(average(record), weight(record), spec_.dim, averaging_.power(missed));
}

void Table::follow_average(uint32_t record, uint64_t round) const {
  // One that was loaded goes on also in the first update of this set.
  const uint64_t before = header(record).count > 1 ? std::max<uint64_t>(round, 1) : round;
  draw_average(average(record), weight(record), spec_.dim, averaging_.kept(before));
}

void Table::fetch(std::span<const int64_t> keys, float* weights, float* state,
                  uint32_t* counts) const {
  uint32_t records[kBatch];
  const size_t width = state_elements_;
  for (size_t begin = 0; begin < keys.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, keys.size() - begin);
    find(keys.subspan(begin, count), records, nullptr);
    for (size_t i = 0; i < count; ++i) {
      if (records[i] != RowIndex::kNone) prefetch_record(records[i]);
    }
    for (size_t i = 0; i < count; ++i) {
      const size_t row = begin + i;
      if (records[i] == RowIndex::kNone) {
        fill_unknown(keys.subspan(row, 1), weights + row * spec_.dim);
        if (width > 0) kernels::init_state(config_, state + row * width, spec_.dim, spec_.dim);
        counts[row] = 0;
        continue;
      }
      std::memcpy(weights + row * spec_.dim, weight(records[i]), spec_.dim * sizeof(float));
      if (width > 0) {
        std::memcpy(state + row * width, this->state(records[i]), width * sizeof(float));
      }
      counts[row] = header(records[i]).count;
    }
  }
}

void Table::check(const wire::TableRows& rows) const {
  const size_t count = rows.keys.size();
  const bool fits = rows.weights.size() == count * spec_.dim &&
                    (rows.state.empty() || rows.state.size() == count * state_elements_) &&
                    (rows.counts.empty() || rows.counts.size() == count);
  if (!fits) {
    throw Error(ErrorCode::kInvalidArgument,
                "table " + spec_.name + ": weights, state or counts do not fit " +
                    std::to_string(count) + " rows of " + std::to_string(spec_.dim) +
                    " elements with " + std::to_string(state_elements_) + " of state");
  }
  for (const int64_t key : rows.keys) check_key(key);
  check_room(rows.keys);
}

void Table::check_key(int64_t key) const {
  if (!spec_.has_key(key)) {
    throw Error(ErrorCode::kRowOutOfRange, "table " + spec_.name + ": row " + std::to_string(key) +
                                               " is not in 0.." + std::to_string(spec_.rows) +
                                               " (exclusive)");
  }
  check_owner(key, hash_of(key));
}

void Table::check_owner(int64_t key, uint64_t hash) const {
  const auto bucket = static_cast<uint32_t>(hash % kernels::kBucketCount);
  const uint32_t owner = wire::owner_of_bucket(bucket, server_count_);
  if (owner == shard_id_) return;
  throw Error(ErrorCode::kInvalidArgument, "table " + spec_.name + ": row " + std::to_string(key) +
                                               " belongs to server " + std::to_string(owner) +
                                               ", not to server " + std::to_string(shard_id_));
}

void Table::check_room(std::span<const int64_t> keys) const {
  if (keys.size() <= kMostRecords - rows_) return;
  if (absent(keys).size() > kMostRecords - rows_) throw_full();
}

void Table::throw_full() const {
  throw Error(ErrorCode::kFull, "table " + spec_.name + ": a server holds at most " +
                                    std::to_string(kMostRecords) + " rows; use more servers");
}

void Table::store(const wire::TableRows& rows) {
  check(rows);
  const size_t width = state_elements_;
  uint64_t hashes[kBatch];
  uint32_t records[kBatch];
  for (size_t begin = 0; begin < rows.keys.size(); begin += kBatch) {
    const auto keys = rows.keys.subspan(begin, std::min(kBatch, rows.keys.size() - begin));
    find_batch(keys, hashes, records, slabs_.stride());
    for (size_t i = 0; i < keys.size(); ++i) {
      const size_t row = begin + i;
      records[i] = record_to_write(keys[i], hashes[i], records[i]);
      std::memcpy(weight(records[i]), rows.weights.data() + row * spec_.dim,
                  spec_.dim * sizeof(float));
      if (!rows.state.empty()) {
        std::memcpy(state(records[i]), rows.state.data() + row * width, width * sizeof(float));
      } else if (width > 0) {
        kernels::init_state(config_, state(records[i]), spec_.dim, spec_.dim);
      }
      header(records[i]).count =
          rows.counts.empty() ? 0 : std::min(rows.counts[row], RowHeader::kMostUpdates);
      begin_average(records[i]);
    }
  }
  count_index();
  step_ = rows.step;
}

uint32_t Table::record_to_write(int64_t key, uint64_t hash, uint32_t found) {
  // Looked up again: the same batch may have made it.
  if (found == RowIndex::kNone) found = find_one(key, hash);
  if (found == RowIndex::kNone) return create(key, hash);
  before_change(found, 0);
  return found;
}

uint32_t Table::create(int64_t key, uint64_t hash) {
  if (unused_ == RowIndex::kNone) slabs_.cover(records_);
  // It alone may find no memory: nothing has changed until then.
  const uint32_t record = unused_ == RowIndex::kNone ? static_cast<uint32_t>(records_) : unused_;
  index_.insert(hash, record);
  if (unused_ == RowIndex::kNone) {
    ++records_;
  } else {
    // A cut knows it as one of no row.
    before_change(record, 0);
    unused_ = static_cast<uint32_t>(header(record).key);
  }
  header(record) = RowHeader{key, 0, static_cast<uint32_t>(updates_)};
  ++rows_;
  return record;
}

void Table::make_room(std::span<const int64_t> keys) {
  if (keys.size() > kMostRecords - rows_) throw_full();
  const std::vector<uint64_t> hashes = hashes_of(keys);
  try {
    index_.reserve(hashes);
  } catch (const std::bad_alloc&) {
    count_index();  // parts of it have grown
    throw;
  }
  count_index();
  const uint64_t records = records_for(keys.size());
  if (records > 0) slabs_.cover(records - 1);
}

uint64_t Table::growth_bytes(std::span<const int64_t> keys) const {
  if (keys.size() > kMostRecords - rows_) throw_full();
  const uint64_t slabs = slabs_.bytes_for(records_for(keys.size()));
  return slabs - std::min(slabs, slabs_.size_bytes()) + index_.growth_bytes(hashes_of(keys));
}

std::vector<int64_t> Table::absent(std::span<const int64_t> keys) const {
  std::set<int64_t> found;
  for (const int64_t key : keys) {
    if (find_one(key, hash_of(key)) == RowIndex::kNone) found.insert(key);
  }
  return {found.begin(), found.end()};
}

uint32_t Table::make(int64_t key) {
  ++made_;
  return create(key, hash_of(key));
}

void Table::begin(std::span<const uint32_t> records) const {
  for (const uint32_t record : records) {
    initial_.fill({&header(record).key, 1}, spec_.dim, weight(record));
    if (state_elements_ > 0) kernels::init_state(config_, state(record), spec_.dim, spec_.dim);
    begin_average(record);
  }
}

// ---- rows that go ----

Swept Table::sweep(const Sweep& sweep) {
  freed_.clear();
  candidates_.clear();
  updates_ = sweep.updates;
  if (!evicts()) return {};
  Swept swept;
  swept.records = choose(sweep);
  free_chosen();
  swept.freed = freed_;
  return swept;
}

uint64_t Table::choose(const Sweep& sweep) {
  eviction_.note(sweep.updates, sweep.now);
  const uint64_t least_age = eviction_.least_age(sweep.updates, sweep.now);
  const uint64_t bound = eviction_.most_rows();
  const uint64_t above = bound == 0 || rows_ <= bound ? 0 : rows_ - bound;
  const auto left = [&] { return above - std::min<uint64_t>(above, freed_.size()); };
  uint64_t looked_at = 0;
  for (; looked_at < records_ && freed_.size() < sweep.most; ++looked_at) {
    // No more than may go in this sweep: a table may be far above its bound.
    const uint64_t going = std::min<uint64_t>(left(), sweep.most - freed_.size());
    if (looked_at >= sweep.records && candidates_.size() >= kLookAt * going) break;
    if (hand_ >= records_) hand_ = 0;
    const auto record = static_cast<uint32_t>(hand_++);
    const RowHeader& row = header(record);
    // Rows of the last update have age 0, those that came since -1.
    const auto age = static_cast<int32_t>(static_cast<uint32_t>(sweep.updates) - 1 - row.last_seen);
    if (!row.is_row() || age <= 0) continue;
    const bool expired = eviction_.expired(static_cast<uint32_t>(age), row.count, least_age);
    if (!expired && above == 0) continue;
    if (std::binary_search(sweep.used.begin(), sweep.used.end(), record)) continue;
    const Freed found{row.key, record};
    if (expired) {
      freed_.push_back(found);
    } else {
      candidates_.push_back({eviction_.rank(static_cast<uint32_t>(age), row.count), found});
    }
  }
  choose_beyond_bound(std::min<uint64_t>(left(), sweep.most - freed_.size()));
  return looked_at;
}

void Table::choose_beyond_bound(size_t count) {
  count = std::min(count, candidates_.size());
  if (count == 0) return;
  // Equal ranks go in the order of records: what goes is the same on every run.
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.row.record < b.row.record;
  };
  const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(count);
  std::nth_element(candidates_.begin(), end - 1, candidates_.end(), before);
  freed_.reserve(freed_.size() + count);
  for (auto one = candidates_.begin(); one != end; ++one) freed_.push_back(one->row);
}

void Table::free_chosen() {
  // The first of them is the first to be used again.
  std::sort(freed_.begin(), freed_.end(),
            [](const Freed& a, const Freed& b) { return a.record > b.record; });
  uint64_t hashes[kBatch];
  for (size_t begin = 0; begin < freed_.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, freed_.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      hashes[i] = hash_of(freed_[begin + i].key);
      index_.prefetch(hashes[i]);
    }
    for (size_t i = 0; i < count; ++i) {
      const uint32_t record = freed_[begin + i].record;
      index_.erase(hashes[i], record);
      before_change(record, 0);
      header(record) = RowHeader{unused_, RowHeader::kNoRow, 0};
      unused_ = record;
    }
  }
  if (freed_.empty()) return;
  rows_ -= freed_.size();
  evicted_ += freed_.size();
  ++sweeps_;
  freed_at_ = updates_;
}

// ---- as snapshots have them ----

void Table::check(const RowColumns& rows) const {
  if (rows.averages != nullptr && !averaged()) {
    throw Error(ErrorCode::kInvalidArgument,
                "table " + spec_.name + ": averages of rows, but none are kept");
  }
  std::vector<int64_t> keys(rows.rows);
  if (rows.rows > 0) std::memcpy(keys.data(), rows.keys, rows.rows * sizeof(int64_t));
  for (const int64_t key : keys) check_key(key);
  check_room(keys);
}

void Table::load(const RowColumns& rows) {
  check(rows);
  expect_rows();
  if (spec_.remote) slabs_.expect(std::min(likely_rows_, records_for(rows.rows)));
  int64_t keys[kBatch];
  uint64_t hashes[kBatch];
  uint32_t records[kBatch];
  for (uint64_t begin = 0; begin < rows.rows; begin += kBatch) {
    const size_t count = std::min<uint64_t>(kBatch, rows.rows - begin);
    std::memcpy(keys, rows.keys + begin * sizeof(int64_t), count * sizeof(int64_t));
    find_batch({keys, count}, hashes, records, slabs_.stride());
    for (size_t i = 0; i < count; ++i) {
      load_row(record_to_write(keys[i], hashes[i], records[i]), rows, begin + i);
    }
  }
  step_ = rows.step;
  count_index();
}

void Table::load_row(uint32_t record, const RowColumns& rows, uint64_t row) {
  const size_t row_bytes = spec_.dim * sizeof(float);
  const size_t state_bytes = state_elements_ * sizeof(float);
  const auto number = [row](const uint8_t* column) {
    uint32_t value = 0;
    if (column != nullptr) std::memcpy(&value, column + row * sizeof(value), sizeof(value));
    return value;
  };
  std::memcpy(weight(record), rows.weights + row * row_bytes, row_bytes);
  if (rows.state != nullptr) {
    std::memcpy(state(record), rows.state + row * state_bytes, state_bytes);
  } else if (state_elements_ > 0) {
    kernels::init_state(config_, state(record), spec_.dim, spec_.dim);
  }
  header(record).count = std::min(number(rows.counts), RowHeader::kMostUpdates);
  header(record).last_seen = number(rows.last_seen) + rows.later;
  if (rows.averages == nullptr) {
    begin_average(record);
  } else {
    std::memcpy(average(record), rows.averages + row * row_bytes, row_bytes);
  }
}

void Table::clear() {
  if (keep_count_ > 0) images_->memory()->fail(ImageMemory::Failure::kDropped);
  keep_count_ = 0;
  index_.clear();
  admission_.forget_all();
  rows_ = 0;
  records_ = 0;
  unused_ = RowIndex::kNone;
  hand_ = 0;
  ++generation_;
}

void Table::renumber(uint64_t before, uint64_t after) {
  const auto later = static_cast<uint32_t>(after - before);
  if (later == 0) return;
  eviction_.renumber(before, after);
  if (evicts()) updates_ += after - before;
  for (uint32_t record = 0; record < records_; ++record) {
    before_change(record, 0);
    header(record).last_seen += later;
  }
}

RecordShape Table::shape() const {
  return {slabs_.stride(), spec_.dim, state_elements_, averaged(), salt_};
}

void Table::freeze(std::shared_ptr<ImageMemory> memory) {
  images_ = std::make_unique<RowImages>(records_, slabs_.per_slab(), slabs_.stride(), kShards,
                                        std::move(memory));
  keep_begin_ = 0;
  keep_count_ = static_cast<uint32_t>(records_);
}

uint32_t Table::copy_frozen(uint8_t* to) {
  const uint32_t count = std::min(keep_count_, slabs_.per_slab());
  if (count == 0) return 0;
  std::memcpy(to, record_at(keep_begin_), count * slabs_.stride());
  images_->overlay(keep_begin_ / slabs_.per_slab(), to);
  keep_begin_ += count;
  keep_count_ -= count;
  return count;
}

std::unique_ptr<RowImages> Table::thaw() {
  keep_count_ = 0;
  return std::move(images_);
}

// ---- runs of keys, each hashed where it is looked at: that is cheaper than its eight bytes ----

struct Table::OwnedKeys {
  static constexpr size_t kMost = 64;  // rows on which the memory system works at once

  int64_t keys[kMost];
  uint64_t hashes[kMost];
  size_t count = 0;
  uint64_t first = 0;  // how many of the run came before

  std::span<const int64_t> span() const { return {keys, count}; }
};

template <typename Batch>
void Table::each_owned(uint64_t begin, uint64_t end, const Batch& batch) const {
  OwnedKeys owned;
  for (uint64_t at = begin; at < end; ++at) {
    const auto key = static_cast<int64_t>(at);
    const uint64_t hash = hash_of(key);
    if (!owns(hash)) continue;
    index_.prefetch(hash);
    owned.keys[owned.count] = key;
    owned.hashes[owned.count] = hash;
    if (++owned.count < OwnedKeys::kMost) continue;
    batch(owned);
    owned.first += owned.count;
    owned.count = 0;
  }
  if (owned.count > 0) batch(owned);
}

std::vector<int64_t> Table::absent(const wire::RunRef& run) const {
  std::vector<int64_t> found;
  each_owned(run.begin, run.end, [&](const OwnedKeys& keys) {
    for (size_t i = 0; i < keys.count; ++i) {
      if (find_one(keys.keys[i], keys.hashes[i]) == RowIndex::kNone) found.push_back(keys.keys[i]);
    }
  });
  return found;
}

uint64_t Table::owned_rows(uint64_t begin, uint64_t end) const {
  if (bucket_count_ == kernels::kBucketCount) return end - begin;
  uint64_t count = 0;
  for (uint64_t at = begin; at < end; ++at) count += owns(hash_of(static_cast<int64_t>(at)));
  return count;
}

void Table::check(const wire::RunView& run) const {
  const wire::RunRef& ref = run.ref;
  const auto refuse = [this, &ref](const std::string& what) {
    throw Error(ErrorCode::kInvalidArgument, "table " + spec_.name + ", rows " +
                                                 std::to_string(ref.begin) + " .. " +
                                                 std::to_string(ref.end) + ": " + what);
  };
  if (ref.state_elements != 0 && ref.state_elements != state_elements_) {
    refuse(std::to_string(ref.state_elements) + " elements of state a row, expected " +
           std::to_string(state_elements_));
  }
  const uint64_t owned = owned_rows(ref.begin, ref.end);
  if (owned != ref.rows) {
    refuse(std::to_string(ref.rows) + " rows, but server " + std::to_string(shard_id_) + " owns " +
           std::to_string(owned) + " of them");
  }
  if (ref.rows <= kMostRecords - rows_) return;
  uint64_t fresh = 0;
  each_owned(ref.begin, ref.end, [&](const OwnedKeys& keys) {
    uint32_t records[OwnedKeys::kMost];
    find_hashed(keys.span(), keys.hashes, records, sizeof(RowHeader));
    fresh += static_cast<uint64_t>(std::count(records, records + keys.count, RowIndex::kNone));
  });
  if (fresh > kMostRecords - rows_) throw_full();
}

void Table::store(const wire::RunView& run) {
  check(run);
  expect_rows();
  if (spec_.remote) slabs_.expect(std::min(likely_rows_, records_for(run.ref.rows)));
  each_owned(run.ref.begin, run.ref.end, [&](const OwnedKeys& keys) { store_batch(keys, run); });
  count_index();
  step_ = run.ref.step;
}

void Table::expect_rows() {
  // How many rows a remote table will have nobody knows: no more than those that come.
  if (spec_.remote) return;
  if (rows_ == 0) {
    index_.reserve(first_bucket_, bucket_count_, std::min(likely_rows_, kMostMade));
  }
  slabs_.expect(likely_rows_);
}

void Table::store_batch(const OwnedKeys& keys, const wire::RunView& run) {
  const size_t dim = spec_.dim;
  const size_t width = state_elements_;
  uint32_t records[OwnedKeys::kMost];
  find_hashed(keys.span(), keys.hashes, records, slabs_.stride());
  for (size_t i = 0; i < keys.count; ++i) {
    const uint64_t row = keys.first + i;
    if (records[i] == RowIndex::kNone) {
      records[i] = create(keys.keys[i], keys.hashes[i]);
    } else {
      before_change(records[i], 0);
    }
    const float* const weights = run.weights.data() + (run.ref.alike ? 0 : row * dim);
    std::memcpy(weight(records[i]), weights, dim * sizeof(float));
    if (!run.state.empty()) {
      std::memcpy(state(records[i]), run.state.data() + row * width, width * sizeof(float));
    } else if (width > 0) {
      kernels::init_state(config_, state(records[i]), dim, dim);
    }
    header(records[i]).count =
        run.counts.empty() ? 0 : std::min(run.counts[row], RowHeader::kMostUpdates);
    begin_average(records[i]);
  }
}

void Table::fetch(const wire::FetchRun& run, float* weights, float* state, uint32_t* counts) const {
  const size_t dim = spec_.dim;
  const size_t width = state_elements_;
  each_owned(run.begin, run.end, [&](const OwnedKeys& keys) {
    uint32_t records[OwnedKeys::kMost];
    find_hashed(keys.span(), keys.hashes, records, slabs_.stride());
    for (size_t i = 0; i < keys.count; ++i) {
      const uint64_t row = keys.first + i;
      if (records[i] == RowIndex::kNone) {
        fetch({&keys.keys[i], 1}, weights + row * dim, state + row * width, counts + row);
        continue;
      }
      std::memcpy(weights + row * dim, weight(records[i]), dim * sizeof(float));
      if (width > 0) {
        std::memcpy(state + row * width, this->state(records[i]), width * sizeof(float));
      }
      counts[row] = header(records[i]).count;
    }
  });
}

void Table::require_known(int64_t key, uint64_t hash) const {
  if (spec_.remote) {
    check_owner(key, hash);
    return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "table " + spec_.name + ": row " + std::to_string(key) +
                  " was never stored on server " + std::to_string(shard_id_) + " (the table has " +
                  std::to_string(spec_.rows) + " rows, this server " + std::to_string(rows_) + ")");
}

}  // namespace cpudist::table
