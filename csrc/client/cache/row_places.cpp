// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/cache/row_places.h"

#include <bit>
#include <cstring>
#include <stdexcept>

namespace cpudist::client {

namespace {

constexpr size_t kPlacesMin = 256;
constexpr size_t kSlabBytes = 256 << 10;
constexpr uint32_t kSlabRowsMin = 16;
constexpr size_t kRowsMost = size_t{1} << 31;

}  // namespace

RowPlaces::RowPlaces(uint32_t dim, uint32_t first_epoch) : dim_(dim), epoch_(first_epoch) {
  const size_t fit = kSlabBytes / (sizeof(float) * std::max(dim, 1u));
  const uint32_t rows = std::max(kSlabRowsMin, static_cast<uint32_t>(std::bit_floor(fit)));
  slab_shift_ = static_cast<uint32_t>(std::countr_zero(rows));
  slab_mask_ = rows - 1;
  use(kernels::AlignedBuffer<Place>(kPlacesMin));
}

size_t RowPlaces::memory_bytes() const {
  const size_t slab_bytes = (size_t{slab_mask_} + 1) * dim_ * sizeof(float);
  return places_.size() * sizeof(Place) + slabs_.size() * slab_bytes;
}

void RowPlaces::reserve(size_t count) {
  while ((size_ + count) * 2 > places_.size()) grow();
  while ((slabs_.size() << slab_shift_) < rows_ + count) {
    slabs_.emplace_back((size_t{slab_mask_} + 1) * dim_);
  }
}

float* RowPlaces::add_values(Place& place) {
  if (rows_ == slabs_.size() << slab_shift_) {
    slabs_.emplace_back((size_t{slab_mask_} + 1) * dim_);
  }
  place.row = ++rows_;
  return values(place);
}

RowPlaces::Place& RowPlaces::insert(int64_t key, uint64_t hash) {
  if ((size_ + 1) * 2 > places_.size()) grow();
  uint64_t at = hash & mask_;
  while (places_[at].epoch == epoch_) at = (at + 1) & mask_;
  ++size_;
  places_[at] = Place{key, {0, 0}, 0, epoch_};
  return places_[at];
}

void RowPlaces::use(kernels::AlignedBuffer<Place> places) {
  places_ = std::move(places);
  mask_ = places_.size() - 1;
}

void RowPlaces::grow() {
  if (size_ >= kRowsMost) {
    throw std::length_error("a trainer holds at most 2^31 rows of a table; step more often");
  }
  kernels::AlignedBuffer<Place> more(places_.size() * 2);
  const kernels::AlignedBuffer<Place> before = std::exchange(places_, {});
  use(std::move(more));
  for (const Place& place : before.span()) {
    if (place.epoch != epoch_) continue;
    uint64_t at = hash_of(place.key) & mask_;
    while (places_[at].epoch == epoch_) at = (at + 1) & mask_;
    places_[at] = place;
  }
}

void RowPlaces::clear() {
  if (size_ > 0) rebuild({}, {});
}

void RowPlaces::rebuild(const std::vector<Place>& kept, const std::vector<Place*>& pointers) {
  // What may throw comes first. A step of half the size of the last one is to cost no memory.
  const size_t wanted = std::max(kPlacesMin, std::bit_ceil(size_ * 8));
  kernels::AlignedBuffer<Place> smaller;
  if (wanted < places_.size()) smaller = kernels::AlignedBuffer<Place>(wanted);
  close_gaps(pointers);
  if (!smaller.empty()) {
    use(std::move(smaller));
  } else if (++epoch_ == 0) {
    std::fill_n(places_.data(), places_.size(), Place{});
    epoch_ = 1;
  }
  size_ = 0;
  for (const Place& place : kept) {
    Place& own = insert(place.key, hash_of(place.key));
    own.mark = place.mark;
    own.row = place.row;
  }
}

void RowPlaces::close_gaps(const std::vector<Place*>& kept) {
  const size_t used = (rows_ + slab_mask_) >> slab_shift_;
  uint32_t count = 0;
  for (const Place* place : kept) count += static_cast<uint32_t>(place->row != 0);
  std::vector<bool> taken(count + 1);
  for (const Place* place : kept) {
    if (place->row <= count) taken[place->row] = true;
  }
  uint32_t gap = 1;
  for (Place* place : kept) {
    if (place->row <= count) continue;
    while (taken[gap]) ++gap;
    const float* from = values(*place);
    place->row = gap++;
    std::memcpy(values(*place), from, dim_ * sizeof(float));
  }
  rows_ = count;
  slabs_.resize(std::min(slabs_.size(), used));
}

}  // namespace cpudist::client
