// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// long: one class, of which each part of a step calls a few members
// Marks: eight bytes a row of a static table replace a hash table per lookup and per gradient; a
// remote one has one hash table for both.
#include "client/row_cache.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "base/errors.h"
#include "kernels/gather_scatter.h"

namespace cpudist::client {

namespace {

// Far enough to hide a cache miss on a stamp, near enough to stay in the cache.
constexpr size_t kPrefetchAhead = 32;
// Keys that are hashed before the first of them is looked for.
constexpr size_t kBatch = 32;

// Where marks are found, for loops that are worth one of each.
struct MarksByKey {
  RowMark* marks;
  void prefetch(int64_t key) const { __builtin_prefetch(marks + key, 1); }
  RowMark& of(int64_t key) const { return marks[key]; }
};
struct MarksInPlaces {
  RowPlaces* places;
  RowMark* none;  // of a key without a place
  void prefetch(int64_t key) const { places->prefetch(RowPlaces::hash_of(key)); }
  RowMark& of(int64_t key) const {
    RowPlaces::Place* const place = places->find(key);
    return place == nullptr ? *none : place->mark;
  }
};

}  // namespace

void KeySplit::run(std::span<const int64_t> keys) {
  if (server_count_ == 1) {
    const size_t known = order_.size();
    if (known < keys.size()) {
      order_.resize(keys.size());
      std::iota(order_.begin() + static_cast<ptrdiff_t>(known), order_.end(),
                static_cast<uint32_t>(known));
    }
    offsets_ = {0, static_cast<uint32_t>(keys.size())};
    return;
  }
  order_.resize(keys.size());
  offsets_.resize(server_count_ + 1);
  partitioner_.run(keys.data(), keys.size(), salt_, owners_.data(), server_count_, order_.data(),
                   offsets_.data());
}

TableCache::TableCache(const wire::TableSpec& spec, uint64_t salt, std::span<const uint16_t> owners,
                       uint32_t server_count, CacheBudget* budget, uint32_t generation)
    : spec_(spec),
      remote_(spec.remote),
      marks_(remote_ ? 0 : spec.rows),
      places_(remote_ ? std::make_unique<RowPlaces>(spec.dim) : nullptr),
      budget_(budget),
      generation_(generation),
      floor_(generation),
      split_(owners, server_count, salt) {}

TableCache::~TableCache() { release(); }

void TableCache::bind(float* weight) {
  weight_ = weight;
  bound_ = true;
  invalidate();
}

void TableCache::refuse_id(int64_t id) const {
  throw Error(ErrorCode::kRowOutOfRange, "table '" + spec_.name + "': id " + std::to_string(id) +
                                             " is outside its " + std::to_string(spec_.rows) +
                                             " rows; ids must be in [0, " +
                                             std::to_string(spec_.rows) + ")");
}

template <typename Id>
void TableCache::check_ids(std::span<const Id> ids) const {
  if (spec_.open) return;
  for (const Id id : ids) {
    if (!spec_.has_key(id)) refuse_id(id);
  }
}

template void TableCache::check_ids(std::span<const int32_t> ids) const;
template void TableCache::check_ids(std::span<const int64_t> ids) const;

template <typename Id>
std::span<const int64_t> TableCache::take_missing(std::span<const Id> ids) {
  require_marks();
  check_ids(ids);
  if (remote_) return take_missing_places(ids);
  RowMark* marks = marks_.data();
  const uint32_t generation = generation_;
  const size_t n = ids.size();
  if (missing_.size() < n) missing_.resize(n);
  int64_t* missing = missing_.data();
  size_t count = 0;
  uint64_t hits = 0;
  // Whether an id repeats cannot be guessed: every key is written, and kept by counting it.
  for (size_t i = 0; i < n; ++i) {
    if (i + kPrefetchAhead < n) __builtin_prefetch(marks + ids[i + kPrefetchAhead], 1);
    const int64_t key = ids[i];
    const uint32_t stamp = std::exchange(marks[key].stamp, generation);
    missing[count] = key;
    count += static_cast<size_t>(stamp != generation) & static_cast<size_t>(stamp != kHeld);
    hits += static_cast<uint64_t>(stamp == kHeld);
  }
  hits_ += hits;
  return {missing, count};
}

template <typename Id>
std::span<const int64_t> TableCache::take_missing_places(std::span<const Id> ids) {
  RowPlaces& places = *places_;
  const size_t n = ids.size();
  if (missing_.size() < n) missing_.resize(n);
  if (looked_up_.size() < n) looked_up_.resize(n);
  if (missing_rows_.size() < n) missing_rows_.resize(n);
  int64_t* missing = missing_.data();
  float** looked_up = looked_up_.data();
  float** missing_rows = missing_rows_.data();
  size_t count = 0;
  uint64_t hits = 0;
  const uint32_t generation = generation_;
  uint64_t hashes[kBatch];
  try {
    for (size_t begin = 0; begin < n; begin += kBatch) {
      const size_t size = std::min(kBatch, n - begin);
      places.reserve(size);
      for (size_t j = 0; j < size; ++j) {
        hashes[j] = RowPlaces::hash_of(ids[begin + j]);
        places.prefetch(hashes[j]);
      }
      for (size_t j = 0; j < size; ++j) {
        const int64_t key = ids[begin + j];
        const size_t rows = places.rows();
        Place& place = places.take_with_values(key, hashes[j]);
        const uint32_t stamp = std::exchange(place.mark.stamp, generation);
        const bool had_values = places.rows() == rows;
        looked_up[begin + j] = places.values(place);
        missing[count] = key;
        missing_rows[count] = looked_up[begin + j];
        const bool stale = stamp != generation;
        count += (static_cast<size_t>(stale) & static_cast<size_t>(stamp != kHeld)) |
                 static_cast<size_t>(!had_values);
        hits += static_cast<uint64_t>(stamp == kHeld);
      }
    }
  } catch (...) {  // there was no memory: what was stamped will not be pulled
    forget({missing, count});
    throw;
  }
  count_values();
  hits_ += hits;
  if (trained_ != nullptr) count = fill_trained(count);
  return {missing, count};
}

size_t TableCache::fill_trained(size_t count) {
  size_t left = 0;
  for (size_t i = 0; i < count; ++i) {
    if (const float* const row = trained_->find_trained(missing_[i])) {
      std::memcpy(missing_rows_[i], row, spec_.dim * sizeof(float));
      continue;
    }
    missing_[left] = missing_[i];
    missing_rows_[left++] = missing_rows_[i];
  }
  return left;
}

template std::span<const int64_t> TableCache::take_missing(std::span<const int32_t> ids);
template std::span<const int64_t> TableCache::take_missing(std::span<const int64_t> ids);

std::vector<int64_t> TableCache::stale(std::span<const int64_t> keys, bool anew) const {
  require_marks();
  check_ids(keys);
  std::vector<int64_t> found;
  found.reserve(keys.size());
  for (const int64_t key : keys) {
    if (anew || find_row(key) == nullptr) found.push_back(key);
  }
  return found;
}

void TableCache::take_in(size_t begin, std::span<const int64_t> keys,
                         std::span<const uint32_t> positions, const float* rows) {
  if (!remote_) return overwrite(keys, rows);
  const size_t row_bytes = spec_.dim * sizeof(float);
  auto* const targets = reinterpret_cast<void* const*>(missing_rows_.data() + begin);
  kernels::scatter_pointers(targets, positions.data(), positions.size(), row_bytes, rows,
                            row_bytes);
}

template <typename Id>
void TableCache::gather(std::span<const Id> ids, float* out) const {
  const size_t row_bytes = spec_.dim * sizeof(float);
  if (remote_) {
    const auto* rows = reinterpret_cast<const void* const*>(looked_up_.data());
    kernels::gather_pointers(rows, ids.size(), row_bytes, out, row_bytes);
  } else if constexpr (sizeof(Id) == sizeof(int64_t)) {
    kernels::gather_rows(weight_, row_bytes, ids.data(), ids.size(), row_bytes, out, row_bytes);
  } else {  // ids of rows are not negative
    const auto* index = reinterpret_cast<const uint32_t*>(ids.data());
    kernels::gather_rows(weight_, row_bytes, index, ids.size(), row_bytes, out, row_bytes);
  }
}

template void TableCache::gather(std::span<const int32_t> ids, float* out) const;
template void TableCache::gather(std::span<const int64_t> ids, float* out) const;

const float* TableCache::find_row(int64_t key) const {
  if (released_) return nullptr;
  const auto here = [this](uint32_t stamp) { return stamp == generation_ || stamp == kHeld; };
  if (!remote_) {
    const auto at = static_cast<size_t>(key);
    return here(marks_[at].stamp) ? weight_ + at * spec_.dim : nullptr;
  }
  const Place* const place = places_->find(key);
  const bool found = place != nullptr && place->row != 0 && here(place->mark.stamp);
  return found ? places_->values(*place) : nullptr;
}

const float* TableCache::find_value(int64_t key) const {
  const float* const row = trained_ == nullptr ? nullptr : trained_->find_trained(key);
  return row == nullptr ? find_row(key) : row;
}

float* TableCache::own_row(int64_t key) {
  if (!remote_) return weight_ + static_cast<size_t>(key) * spec_.dim;
  Place& place = places_->take(key);
  return place.row == 0 ? places_->add_values(place) : places_->values(place);
}

void TableCache::count_values() {
  if (budget_ == nullptr) return;
  const uint64_t bytes = places_ ? places_->values_bytes() : 0;
  budget_->used_bytes += bytes - counted_bytes_;
  counted_bytes_ = bytes;
}

void TableCache::keep_budget() {
  if (budget_ == nullptr || !places_) return;
  count_values();
  if (budget_->used_bytes <= budget_->limit_bytes) return;
  const size_t rows = places_->rows();
  places_->drop_values(is_coming);
  budget_->dropped_rows += rows - places_->rows();
  count_values();
}

size_t TableCache::memory_bytes() const {
  return marks_.size() * sizeof(RowMark) + (places_ ? places_->memory_bytes() : 0);
}

void TableCache::forget(std::span<const int64_t> keys) {
  for (const int64_t key : marked(keys)) {
    if (RowMark* const mark = find_mark(key)) mark->stamp = 0;
  }
}

void TableCache::release() {
  released_ = true;
  marks_ = {};
  places_.reset();
  missing_ = {};
  looked_up_ = {};
  missing_rows_ = {};
  count_values();
}

void TableCache::require_marks() const {
  if (!released_) return;
  throw Error(ErrorCode::kClosed, "table '" + spec_.name + "': its parameter set is closed");
}

void TableCache::raise_generation() {
  if (generation_ + 1 < kKept) {
    ++generation_;
    return;
  }
  std::fill_n(marks_.data(), marks_.size(), RowMark{0, 0});
  if (places_) places_->clear();
  generation_ = 1;
  floor_ = 1;
}

void TableCache::refresh() { raise_generation(); }

void TableCache::invalidate() {
  raise_generation();
  floor_ = generation_;
  if (!places_) return;
  try {
    if (has_coming_) {
      places_->retain(is_coming);
      has_coming_ = places_->size() > 0;
    } else {
      places_->clear();
    }
  } catch (const std::bad_alloc&) {
    // Nothing in them is current any more: they stay for another step, and that is all.
  }
  count_values();
}

void TableCache::refuse_unpulled(int64_t id) const {
  throw Error(ErrorCode::kUnpulledRow,
              "table '" + spec_.name + "': the gradient has row " + std::to_string(id) +
                  ", which was not pulled since its last update. Call zero_grad() before every "
                  "backward: a table's gradient cannot be kept over a step. Look rows up through "
                  "the table's module, not through its weight (F.embedding), compile a model "
                  "after its optimizer is wrapped, and run forward and backward before every step");
}

template <typename Marks>
size_t TableCache::take_pulled_from(const Marks& marks, std::span<const int64_t> keys,
                                    int64_t* unique, uint32_t* inverse) {
  const size_t n = keys.size();
  uint32_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    const int64_t key = keys[i];
    if (!spec_.has_key(key)) refuse_id(key);
    // Rows of one batch lie together in `keys` but not in the table.
    if (i + kPrefetchAhead < n && spec_.has_key(keys[i + kPrefetchAhead])) {
      marks.prefetch(keys[i + kPrefetchAhead]);
    }
    RowMark& mark = marks.of(key);
    // As well for the stamps of rows to come, which lie above every generation.
    if (mark.stamp - floor_ > generation_ - floor_) refuse_unpulled(key);
    // Without a branch, as whether a key repeats cannot be guessed. unique[count] has room: at
    // most i keys are counted.
    unique[count] = key;
    const bool known = unique[std::min(mark.place, count)] == key && mark.place < count;
    mark.place = known ? mark.place : count;
    count += static_cast<uint32_t>(!known);
    inverse[i] = mark.place;
  }
  return count;
}

size_t TableCache::take_pulled(std::span<const int64_t> keys, int64_t* unique, uint32_t* inverse) {
  require_marks();
  if (!remote_) return take_pulled_from(MarksByKey{marks_.data()}, keys, unique, inverse);
  RowMark none{0, 0};
  return take_pulled_from(MarksInPlaces{places_.get(), &none}, keys, unique, inverse);
}

// ---- rows of batches to come -------------------------------------------------------------------

template <typename Id>
void TableCache::take_coming(std::span<const Id> ids, bool anew, std::vector<int64_t>* keys,
                             std::vector<int64_t>* pulled) {
  require_marks();
  has_coming_ = true;
  const size_t n = ids.size();
  for (size_t i = 0; i < n; ++i) {
    if (!remote_ && i + kPrefetchAhead < n) {
      __builtin_prefetch(marks_.data() + ids[i + kPrefetchAhead], 1);
    }
    const int64_t key = ids[i];
    RowMark& own = mark(key);
    if (own.place < keys->size() && (*keys)[own.place] == key) continue;
    keys->push_back(key);
    own.place = static_cast<uint32_t>(keys->size() - 1);
    const bool current = own.stamp == generation_;
    const bool coming = own.stamp == kPending || own.stamp == kHeld;
    if (anew || !(current || coming)) {
      pulled->push_back(key);
      if (!current) own.stamp = kPending;
    }
  }
}

template void TableCache::take_coming(std::span<const int32_t> ids, bool anew,
                                      std::vector<int64_t>* keys, std::vector<int64_t>* pulled);
template void TableCache::take_coming(std::span<const int64_t> ids, bool anew,
                                      std::vector<int64_t>* keys, std::vector<int64_t>* pulled);

template <typename Id>
size_t TableCache::want(std::span<const Id> ids) {
  size_t count = 0;
  for (const Id id : marked(ids)) {
    RowMark* const mark = find_mark(id);
    if (mark == nullptr || mark->stamp != kPending) continue;
    mark->stamp = kWanted;
    ++count;
  }
  return count;
}

template size_t TableCache::want(std::span<const int32_t> ids);
template size_t TableCache::want(std::span<const int64_t> ids);

template <typename Id>
void TableCache::give_up_wanted(std::span<const Id> ids) {
  for (const Id id : marked(ids)) {
    RowMark* const mark = find_mark(id);
    if (mark != nullptr && mark->stamp == kWanted) mark->stamp = 0;
  }
}

template void TableCache::give_up_wanted(std::span<const int32_t> ids);
template void TableCache::give_up_wanted(std::span<const int64_t> ids);

bool TableCache::wants_any(std::span<const int64_t> keys) const {
  keys = marked(keys);
  return std::any_of(keys.begin(), keys.end(), [this](int64_t key) {
    const RowMark* const mark = find_mark(key);
    return mark != nullptr && mark->stamp == kWanted;
  });
}

void TableCache::place(std::span<const int64_t> keys, const float* rows) {
  keys = marked(keys);
  const size_t dim = spec_.dim;
  for (size_t i = 0; i < keys.size(); ++i) {
    RowMark* const mark = find_mark(keys[i]);
    if (mark == nullptr || (mark->stamp != kPending && mark->stamp != kWanted)) continue;
    std::memcpy(own_row(keys[i]), rows + i * dim, dim * sizeof(float));
    mark->stamp = kHeld;
  }
  count_values();
}

bool TableCache::all_current(std::span<const int64_t> keys) const {
  keys = marked(keys);
  return std::all_of(keys.begin(), keys.end(), [this](int64_t key) {
    const RowMark* const mark = find_mark(key);
    return mark != nullptr && mark->stamp == generation_;
  });
}

void TableCache::drop(std::span<const int64_t> keys) {
  for (const int64_t key : marked(keys)) {
    RowMark* const mark = find_mark(key);
    if (mark != nullptr && mark->stamp >= kHeld) mark->stamp = 0;
  }
}

void TableCache::unite(std::span<const int64_t> more, std::vector<int64_t>* keys) {
  for (const int64_t key : marked(more)) {
    RowMark& own = mark(key);
    if (own.place < keys->size() && (*keys)[own.place] == key) continue;
    own.place = static_cast<uint32_t>(keys->size());
    keys->push_back(key);
  }
}

void TableCache::overwrite(std::span<const int64_t> keys, const float* rows) {
  keys = marked(keys);
  const size_t dim = spec_.dim;
  if (!remote_) {
    const size_t row_bytes = dim * sizeof(float);
    kernels::scatter_rows(weight_, row_bytes, keys.data(), keys.size(), row_bytes, rows, row_bytes);
    return;
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    const Place* const place = places_->find(keys[i]);
    if (place == nullptr || place->row == 0) continue;
    std::memcpy(places_->values(*place), rows + i * dim, dim * sizeof(float));
  }
}

void TableCache::keep(std::span<const int64_t> keys) {
  has_coming_ = true;
  for (const int64_t key : marked(keys)) {
    if (find_row(key) != nullptr) find_mark(key)->stamp = kKept;
  }
}

void TableCache::hold(std::span<const int64_t> keys) {
  for (const int64_t key : marked(keys)) {
    RowMark* const mark = find_mark(key);
    if (mark != nullptr && mark->stamp == kKept) mark->stamp = kHeld;
  }
}

void TableCache::await(std::span<const int64_t> keys) {
  has_coming_ = true;
  for (const int64_t key : marked(keys)) mark(key).stamp = kPending;
}

}  // namespace cpudist::client
