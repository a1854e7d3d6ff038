// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What is known of some rows of a table that may have any number of them: a mark and values by key,
// in memory that goes with the rows in it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/aligned.h"
#include "kernels/hash.h"

namespace cpudist::client {

// `place` is where a key stands among the distinct keys of a gradient, if it stands there: a place
// left over from an earlier gradient names another key or none.
struct RowMark {
  uint32_t stamp;
  uint32_t place;
};

// Places in an open-addressing table, at most half full; values in slabs that do not move, so that
// their addresses hold while places are added. All keys but none are legal. Not thread safe.
class RowPlaces {
 public:
  struct Place {
    int64_t key;
    RowMark mark;
    uint32_t row;    // number of its values, from 1; 0: it has none
    uint32_t epoch;  // empty unless it is that of the table
  };

  // `first_epoch`: where the count of clear() begins.
  explicit RowPlaces(uint32_t dim, uint32_t first_epoch = 1);

  static uint64_t hash_of(int64_t key) { return kernels::mix64(static_cast<uint64_t>(key)); }
  // What take() and find() will read first.
  void prefetch(uint64_t hash) const { __builtin_prefetch(&places_[hash & mask_], 1); }
  Place* find(int64_t key) { return find(key, hash_of(key)); }
  const Place* find(int64_t key) const { return const_cast<RowPlaces*>(this)->find(key); }
  // The place of a key, made if there was none: with mark zero and without values. It moves with
  // the next one that is made.
  Place& take(int64_t key) { return take(key, hash_of(key)); }
  inline Place& take(int64_t key, uint64_t hash);
  // Room for `count` more places and values: until there are so many, no place moves.
  void reserve(size_t count);
  // As take(), and it has values. reserve() has made room.
  inline Place& take_with_values(int64_t key, uint64_t hash);

  // The values of a place that has some.
  float* values(const Place& place) {
    const uint32_t at = place.row - 1;
    return slabs_[at >> slab_shift_].data() + (at & slab_mask_) * size_t{dim_};
  }
  // Gives a place that has none values, which are whatever was there before.
  float* add_values(Place& place);

  size_t size() const { return size_; }
  size_t rows() const { return rows_; }  // that have values
  size_t values_bytes() const { return rows_ * dim_ * sizeof(float); }
  size_t memory_bytes() const;

  // Calls `use(key, values)` for all places that have values.
  template <typename Use>
  void each(const Use& use) {
    for (const Place& place : places_.span()) {
      if (place.epoch == epoch_ && place.row != 0) use(place.key, values(place));
    }
  }
  // The same of all places, with values or without.
  template <typename Use>
  void each_place(const Use& use) {
    for (Place& place : places_.span()) {
      if (place.epoch == epoch_) use(place);
    }
  }
  // Forgets everything. Memory stays for as many rows as there were.
  void clear();
  // Forgets all places but those that `keep` is true of. Values of others move.
  template <typename Keep>
  void retain(const Keep& keep);
  // Takes the values of all places but those that `keep` is true of, and gives their memory back.
  template <typename Keep>
  void drop_values(const Keep& keep);

 private:
  inline Place* find(int64_t key, uint64_t hash);
  Place& insert(int64_t key, uint64_t hash);
  void grow();
  void use(kernels::AlignedBuffer<Place> places);
  // `pointers` are those into `kept`. Changes nothing if it throws.
  void rebuild(const std::vector<Place>& kept, const std::vector<Place*>& pointers);
  // Numbers the values of `kept` from 1 without gaps.
  void close_gaps(const std::vector<Place*>& kept);

  uint32_t dim_;
  uint32_t slab_shift_;
  uint32_t slab_mask_;
  kernels::AlignedBuffer<Place> places_;
  uint64_t mask_ = 0;
  uint32_t epoch_;
  size_t size_ = 0;
  std::vector<kernels::AlignedBuffer<float>> slabs_;
  uint32_t rows_ = 0;
};

inline RowPlaces::Place* RowPlaces::find(int64_t key, uint64_t hash) {
  Place* const places = places_.data();
  for (uint64_t at = hash & mask_; places[at].epoch == epoch_; at = (at + 1) & mask_) {
    if (places[at].key == key) return &places[at];
  }
  return nullptr;
}

inline RowPlaces::Place& RowPlaces::take(int64_t key, uint64_t hash) {
  Place* const found = find(key, hash);
  return found != nullptr ? *found : insert(key, hash);
}

inline RowPlaces::Place& RowPlaces::take_with_values(int64_t key, uint64_t hash) {
  Place* const places = places_.data();
  uint64_t at = hash & mask_;
  while (places[at].epoch == epoch_ && places[at].key != key) at = (at + 1) & mask_;
  // Without a branch, as whether a key repeats cannot be guessed.
  Place& place = places[at];
  const bool fresh = place.epoch != epoch_;
  const uint32_t row = fresh ? 0 : place.row;
  size_ += static_cast<size_t>(fresh);
  rows_ += static_cast<uint32_t>(row == 0);
  place.key = key;
  place.mark.stamp = fresh ? 0 : place.mark.stamp;
  place.mark.place = fresh ? 0 : place.mark.place;
  place.row = row == 0 ? rows_ : row;
  place.epoch = epoch_;
  return place;
}

template <typename Keep>
void RowPlaces::retain(const Keep& keep) {
  std::vector<Place> kept;
  for (const Place& place : places_.span()) {
    if (place.epoch == epoch_ && keep(place)) kept.push_back(place);
  }
  std::vector<Place*> pointers;
  for (Place& place : kept) pointers.push_back(&place);
  rebuild(kept, pointers);
}

template <typename Keep>
void RowPlaces::drop_values(const Keep& keep) {
  std::vector<Place*> kept;
  for (Place& place : places_.span()) {
    if (place.epoch != epoch_ || place.row == 0) continue;
    if (keep(std::as_const(place))) {
      kept.push_back(&place);
    } else {
      place.row = 0;
    }
  }
  close_gaps(kept);
  slabs_.resize((rows_ + slab_mask_) >> slab_shift_);
}

}  // namespace cpudist::client
