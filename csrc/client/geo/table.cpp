// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/geo/table.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "base/errors.h"
#include "kernels/dedupe.h"
#include "kernels/hash.h"

namespace cpudist::client {
namespace {

// Far enough to hide a cache miss, near enough to stay in the cache.
constexpr size_t kPrefetchMarks = 16;

}  // namespace

GeoTable::GeoTable(const wire::TableSpec& spec, uint64_t salt, std::span<const uint16_t> owners,
                   uint32_t server_count, bool tracks, const kernels::OptimizerConfig* rule)
    : spec_(spec),
      salt_(salt),
      owners_(owners),
      tracks_(tracks),
      marks_(spec.remote ? 0 : spec.rows),
      touched_(server_count) {
  if (spec.remote) {
    if (rule == nullptr) {
      throw Error(ErrorCode::kInternal, "table '" + spec.name + "' is remote and has no rule here");
    }
    slots_ = std::make_unique<GeoSlots>(spec.dim, *rule, tracks);
    return;
  }
  // Shadows are numbered with 32 bits.
  if (!tracks || spec.rows < std::numeric_limits<uint32_t>::max()) return;
  throw Error(ErrorCode::kInvalidArgument,
              "table '" + spec.name + "': " + std::to_string(spec.rows) +
                  " rows, at most 2^32 - 2 where trainers exchange deltas");
}

uint32_t GeoTable::owner_of(int64_t key) const { return owners_[kernels::bucket_of(key, salt_)]; }

void GeoTable::check_size(size_t keys) const {
  if (keys <= std::numeric_limits<uint32_t>::max()) return;
  throw Error(ErrorCode::kInvalidArgument, "a gradient of " + std::to_string(keys) +
                                               " rows for table '" + spec_.name +
                                               "', at most 2^32 - 1; step more often");
}

size_t GeoTable::dedupe(std::span<const int64_t> keys) {
  const size_t n = keys.size();
  check_size(n);
  for (const int64_t key : keys) {
    if (static_cast<uint64_t>(key) < spec_.rows) continue;
    throw Error(ErrorCode::kRowOutOfRange, "table '" + spec_.name + "': id " + std::to_string(key) +
                                               " is outside its " + std::to_string(spec_.rows) +
                                               " rows");
  }
  unique_.resize(n);
  inverse_.resize(n);
  RowMark* marks = marks_.data();
  uint32_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    if (i + kPrefetchMarks < n) __builtin_prefetch(marks + keys[i + kPrefetchMarks], 1);
    const int64_t key = keys[i];
    uint32_t& place = marks[key].place;
    if (place >= count || unique_[place] != key) {
      place = count;
      unique_[count++] = key;
    }
    inverse_[i] = place;
  }
  return count;
}

void GeoTable::add_shadow(RowMark& mark, const float* row) {
  if (shadow_rows_ % kSlabRows == 0) {
    const uint64_t left = spec_.rows - shadow_rows_;
    slabs_.emplace_back(static_cast<size_t>(std::min<uint64_t>(left, kSlabRows)) * spec_.dim);
  }
  mark.shadow = static_cast<uint32_t>(++shadow_rows_);
  std::memcpy(shadow_at(mark.shadow), row, size_t{spec_.dim} * sizeof(float));
}

void GeoTable::note_touched(const float* weight, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const int64_t key = unique_[i];
    RowMark& mark = marks_[static_cast<size_t>(key)];
    if (mark.shadow == 0) add_shadow(mark, weight + static_cast<size_t>(key) * spec_.dim);
    if (mark.touched == interval_) continue;
    touched_[owner_of(key)].push_back(key);
    mark.touched = interval_;
  }
}

size_t GeoTable::sum_up(const kernels::OptimizerConfig& config, const float* gradients,
                        size_t count) {
  const size_t dim = spec_.dim;
  sums_.resize(std::max(sums_.size(), count * dim));
  kernels::segment_sum(gradients, dim, inverse_.size(), dim, inverse_.data(), sums_.data());
  weights_.resize(count);
  states_.resize(count);
  sources_.resize(count);
  updates_.resize(count);
  return kernels::state_elements(config, dim, dim);
}

void GeoTable::step_rows(const kernels::OptimizerConfig& config, int64_t step, size_t count) {
  const size_t dim = spec_.dim;
  if (kernels::counts_per_row(config) && kernels::step_dependent(config)) {
    kernels::StepCache<float> steps(config);
    for (size_t i = 0; i < count; ++i) {
      kernels::update(steps.at(updates_[i]), weights_[i], states_[i], sources_[i], dim, dim);
    }
    return;
  }
  const bool has_state = kernels::state_elements(config, dim, dim) > 0;
  kernels::update_rows(kernels::make_step<float>(config, step), weights_.data(),
                       has_state ? states_.data() : nullptr, sources_.data(), count, dim);
}

uint64_t GeoTable::update(const LocalRows& rows, const kernels::OptimizerConfig& config,
                          int64_t step, std::span<const int64_t> keys, const float* gradients) {
  const size_t dim = spec_.dim;
  const size_t count = dedupe(keys);
  if (tracks_) note_touched(rows.weight, count);
  const size_t state_elements = sum_up(config, gradients, count);
  for (size_t i = 0; i < count; ++i) {
    const auto key = static_cast<size_t>(unique_[i]);
    uint32_t& updates = rows.counts[key];
    if (updates != std::numeric_limits<uint32_t>::max()) ++updates;
    updates_[i] = updates;
    weights_[i] = rows.weight + key * dim;
    states_[i] = state_elements == 0 ? nullptr : rows.state + key * state_elements;
    sources_[i] = sums_.data() + i * dim;
  }
  step_rows(config, step, count);
  return count;
}

std::vector<int64_t> GeoTable::take_keys(TableCache& cache, std::span<const int64_t> keys) {
  check_size(keys.size());
  unique_.resize(keys.size());
  inverse_.resize(keys.size());
  unique_count_ = cache.take_pulled(keys, unique_.data(), inverse_.data());
  std::vector<int64_t> absent;
  for (size_t i = 0; i < unique_count_; ++i) {
    if (slots_->find(unique_[i]) == nullptr) absent.push_back(unique_[i]);
  }
  return absent;
}

uint64_t GeoTable::update_slots(const kernels::OptimizerConfig& config, int64_t step,
                                const float* gradients) {
  const size_t dim = spec_.dim;
  const size_t count = unique_count_;
  const size_t state_elements = sum_up(config, gradients, count);
  for (size_t i = 0; i < count; ++i) {
    const int64_t key = unique_[i];
    GeoSlots::Slot& slot = *slots_->find(key);
    updates_[i] = slots_->count(slot);
    if (updates_[i] != std::numeric_limits<uint32_t>::max()) ++updates_[i];
    slots_->set_count(slot, updates_[i]);
    weights_[i] = slots_->weight(slot);
    states_[i] = state_elements == 0 ? nullptr : slots_->state(slot);
    sources_[i] = sums_.data() + i * dim;
    if (GeoSlots::touched(slot) == interval_) continue;
    if (tracks_) touched_[owner_of(key)].push_back(key);
    GeoSlots::touch(slot, interval_);
  }
  step_rows(config, step, count);
  return count;
}

void GeoTable::next_interval() noexcept {
  for (auto& keys : touched_) keys.clear();
  if (interval_ == std::numeric_limits<uint32_t>::max()) {
    for (RowMark& mark : std::span(marks_.data(), marks_.size())) mark.touched = 0;
    if (slots_) slots_->each([](GeoSlots::Slot& slot) { GeoSlots::touch(slot, 0); });
    interval_ = 0;
  }
  ++interval_;
}

void GeoTable::put_back(uint32_t server, std::span<const int64_t> keys) noexcept {
  for (const int64_t key : keys) {
    if (slots_) {
      GeoSlots::touch(*slots_->find(key), interval_);
    } else {
      marks_[static_cast<size_t>(key)].touched = interval_;
    }
  }
  touched_[server].assign(keys.begin(), keys.end());
}

std::vector<std::vector<int64_t>> GeoTable::shadowed() const {
  std::vector<std::vector<int64_t>> keys(touched_.size());
  if (slots_) {
    slots_->each([&](const GeoSlots::Slot& slot) { keys[owner_of(slot.key)].push_back(slot.key); });
    return keys;
  }
  for (size_t key = 0; key < marks_.size(); ++key) {
    if (marks_.data()[key].shadow == 0) continue;
    keys[owner_of(static_cast<int64_t>(key))].push_back(static_cast<int64_t>(key));
  }
  return keys;
}

float* GeoTable::shadow(int64_t key) {
  if (slots_) {
    const GeoSlots::Slot* const slot = slots_->find(key);
    return slot == nullptr ? nullptr : slots_->shadow(*slot);
  }
  const uint32_t number = marks_[static_cast<size_t>(key)].shadow;
  return number == 0 ? nullptr : shadow_at(number);
}

void GeoTable::forget_shadows() {
  for (auto& keys : touched_) keys.clear();
  if (slots_) {
    slots_->each([this](GeoSlots::Slot& slot) {
      if (tracks_) std::copy_n(slots_->weight(slot), spec_.dim, slots_->shadow(slot));
      GeoSlots::touch(slot, 0);
    });
    interval_ = 1;
    return;
  }
  for (RowMark& mark : std::span(marks_.data(), marks_.size())) mark.shadow = mark.touched = 0;
  interval_ = 1;
  shadow_rows_ = 0;
  slabs_.clear();
}

std::vector<int64_t> GeoTable::moved(float* weight, bool touched_only, size_t* touched) {
  std::vector<int64_t> keys;
  for (const auto& owned : touched_) keys.insert(keys.end(), owned.begin(), owned.end());
  *touched = keys.size();
  if (touched_only) return keys;
  const std::unordered_set<int64_t> told(keys.begin(), keys.end());
  for (const auto& owned : shadowed()) {
    for (const int64_t key : owned) {
      if (told.contains(key)) continue;
      const size_t row_bytes = size_t{spec_.dim} * sizeof(float);
      if (std::memcmp(row(key, weight), shadow(key), row_bytes) != 0) keys.push_back(key);
    }
  }
  return keys;
}

void GeoTable::set_moved(int64_t key, float* weight, const float* values, const float* agreed,
                         bool touched) {
  uint32_t* stamp = nullptr;
  if (slots_) {
    stamp = &slots_->find(key)->mark.stamp;
  } else {
    RowMark& mark = marks_[static_cast<size_t>(key)];
    if (mark.shadow == 0) add_shadow(mark, agreed);
    stamp = &mark.touched;
  }
  std::copy_n(agreed, spec_.dim, shadow(key));
  std::copy_n(values, spec_.dim, row(key, weight));
  if (!touched || *stamp == interval_) return;
  touched_[owner_of(key)].push_back(key);
  *stamp = interval_;
}

uint64_t GeoTable::size_bytes() const {
  if (slots_) return slots_->memory_bytes();
  uint64_t size = marks_.size() * sizeof(RowMark);
  for (const auto& slab : slabs_) size += slab.size() * sizeof(float);
  return size;
}

}  // namespace cpudist::client
