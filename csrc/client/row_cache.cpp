// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Marks: eight bytes a row replace a hash table per lookup and per gradient.
#include "client/row_cache.h"

#include <algorithm>
#include <cstring>

#include "base/errors.h"

namespace cpudist::client {

namespace {

// Far enough to hide a cache miss on a stamp, near enough to stay in the cache.
constexpr size_t kPrefetchAhead = 32;

}  // namespace

void KeySplit::run(std::span<const int64_t> keys) {
  order_.resize(keys.size());
  offsets_.resize(server_count_ + 1);
  partitioner_.run(keys.data(), keys.size(), salt_, owners_.data(), server_count_, order_.data(),
                   offsets_.data());
}

TableCache::TableCache(const wire::TableSpec& spec, uint64_t salt, std::span<const uint16_t> owners,
                       uint32_t server_count)
    : spec_(spec), marks_(spec.rows), split_(owners, server_count, salt) {}

void TableCache::bind(float* weight) {
  weight_ = weight;
  bound_ = true;
  // Rows are written and read at random; a page walk per row costs more than the row.
  kernels::prefer_huge_pages(weight, spec_.rows * spec_.dim * sizeof(float));
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
  for (const Id id : ids) {
    if (static_cast<uint64_t>(static_cast<int64_t>(id)) >= spec_.rows) refuse_id(id);
  }
}

template void TableCache::check_ids(std::span<const int32_t> ids) const;
template void TableCache::check_ids(std::span<const int64_t> ids) const;

template <typename Id>
std::span<const int64_t> TableCache::take_missing(std::span<const Id> ids) {
  require_marks();
  check_ids(ids);
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

template std::span<const int64_t> TableCache::take_missing(std::span<const int32_t> ids);
template std::span<const int64_t> TableCache::take_missing(std::span<const int64_t> ids);

std::vector<int64_t> TableCache::stale(std::span<const int64_t> keys, bool anew) const {
  require_marks();
  check_ids(keys);
  std::vector<int64_t> found;
  found.reserve(keys.size());
  for (const int64_t key : keys) {
    const uint32_t stamp = marks_[static_cast<size_t>(key)].stamp;
    if (anew || (stamp != generation_ && stamp != kHeld)) found.push_back(key);
  }
  return found;
}

void TableCache::forget(std::span<const int64_t> keys) {
  for (const int64_t key : marked(keys)) marks_[static_cast<size_t>(key)].stamp = 0;
}

void TableCache::release() {
  released_ = true;
  marks_ = {};
  missing_ = {};
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
  generation_ = 1;
  floor_ = 1;
}

void TableCache::refresh() { raise_generation(); }

void TableCache::invalidate() {
  raise_generation();
  floor_ = generation_;
}

void TableCache::refuse_unpulled(int64_t id) const {
  throw Error(ErrorCode::kUnpulledRow,
              "table '" + spec_.name + "': the gradient has row " + std::to_string(id) +
                  ", which was not pulled since its last update. Call zero_grad() before every "
                  "backward: a table's gradient cannot be kept over a step. Look rows up through "
                  "the table's module, not through its weight (F.embedding), compile a model "
                  "after its optimizer is wrapped, and run forward and backward before every step");
}

size_t TableCache::take_pulled(std::span<const int64_t> keys, int64_t* unique, uint32_t* inverse) {
  require_marks();
  RowMark* marks = marks_.data();
  const size_t n = keys.size();
  uint32_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    const int64_t key = keys[i];
    if (static_cast<uint64_t>(key) >= spec_.rows) refuse_id(key);
    // Rows of one batch lie together in `keys` but not in the table.
    if (i + kPrefetchAhead < n && static_cast<uint64_t>(keys[i + kPrefetchAhead]) < spec_.rows) {
      __builtin_prefetch(marks + keys[i + kPrefetchAhead], 1);
    }
    RowMark& mark = marks[key];
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

// ---- rows of batches to come -------------------------------------------------------------------

template <typename Id>
void TableCache::take_coming(std::span<const Id> ids, bool anew, std::vector<int64_t>* keys,
                             std::vector<int64_t>* pulled) {
  require_marks();
  RowMark* marks = marks_.data();
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i + kPrefetchAhead < ids.size()) __builtin_prefetch(marks + ids[i + kPrefetchAhead], 1);
    const int64_t key = ids[i];
    RowMark& mark = marks[key];
    if (mark.place < keys->size() && (*keys)[mark.place] == key) continue;
    mark.place = static_cast<uint32_t>(keys->size());
    keys->push_back(key);
    const bool current = mark.stamp == generation_;
    const bool coming = mark.stamp == kPending || mark.stamp == kHeld;
    if (anew || !(current || coming)) {
      pulled->push_back(key);
      if (!current) mark.stamp = kPending;
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
    RowMark& mark = marks_[static_cast<size_t>(id)];
    if (mark.stamp != kPending) continue;
    mark.stamp = kWanted;
    ++count;
  }
  return count;
}

template size_t TableCache::want(std::span<const int32_t> ids);
template size_t TableCache::want(std::span<const int64_t> ids);

template <typename Id>
void TableCache::give_up_wanted(std::span<const Id> ids) {
  for (const Id id : marked(ids)) {
    RowMark& mark = marks_[static_cast<size_t>(id)];
    if (mark.stamp == kWanted) mark.stamp = 0;
  }
}

template void TableCache::give_up_wanted(std::span<const int32_t> ids);
template void TableCache::give_up_wanted(std::span<const int64_t> ids);

bool TableCache::wants_any(std::span<const int64_t> keys) const {
  keys = marked(keys);
  return std::any_of(keys.begin(), keys.end(), [this](int64_t key) {
    return marks_[static_cast<size_t>(key)].stamp == kWanted;
  });
}

void TableCache::place(std::span<const int64_t> keys, const float* rows) {
  keys = marked(keys);
  const size_t dim = spec_.dim;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto key = static_cast<size_t>(keys[i]);
    RowMark& mark = marks_[key];
    if (mark.stamp != kPending && mark.stamp != kWanted) continue;
    std::memcpy(weight_ + key * dim, rows + i * dim, dim * sizeof(float));
    mark.stamp = kHeld;
  }
}

bool TableCache::all_current(std::span<const int64_t> keys) const {
  keys = marked(keys);
  return std::all_of(keys.begin(), keys.end(), [this](int64_t key) {
    return marks_[static_cast<size_t>(key)].stamp == generation_;
  });
}

void TableCache::drop(std::span<const int64_t> keys) {
  for (const int64_t key : marked(keys)) {
    RowMark& mark = marks_[static_cast<size_t>(key)];
    if (mark.stamp >= kHeld) mark.stamp = 0;
  }
}

void TableCache::unite(std::span<const int64_t> more, std::vector<int64_t>* keys) {
  for (const int64_t key : marked(more)) {
    RowMark& mark = marks_[static_cast<size_t>(key)];
    if (mark.place < keys->size() && (*keys)[mark.place] == key) continue;
    mark.place = static_cast<uint32_t>(keys->size());
    keys->push_back(key);
  }
}

void TableCache::overwrite(std::span<const int64_t> keys, const float* rows) {
  keys = marked(keys);
  const size_t dim = spec_.dim;
  for (size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(weight_ + static_cast<size_t>(keys[i]) * dim, rows + i * dim, dim * sizeof(float));
  }
}

void TableCache::keep(std::span<const int64_t> keys) {
  for (const int64_t key : marked(keys)) {
    RowMark& mark = marks_[static_cast<size_t>(key)];
    if (mark.stamp == generation_ || mark.stamp == kHeld) mark.stamp = kKept;
  }
}

void TableCache::hold(std::span<const int64_t> keys) {
  for (const int64_t key : marked(keys)) {
    RowMark& mark = marks_[static_cast<size_t>(key)];
    if (mark.stamp == kKept) mark.stamp = kHeld;
  }
}

void TableCache::await(std::span<const int64_t> keys) {
  for (const int64_t key : marked(keys)) marks_[static_cast<size_t>(key)].stamp = kPending;
}

}  // namespace cpudist::client
