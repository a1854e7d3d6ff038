// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/geo/slots.h"

#include <algorithm>

namespace cpudist::client {

namespace {

uint32_t state_elements_of(const kernels::OptimizerConfig& rule, uint32_t dim) {
  return static_cast<uint32_t>(kernels::state_elements(rule, dim, dim));
}

}  // namespace

GeoSlots::GeoSlots(uint32_t dim, const kernels::OptimizerConfig& rule, bool shadows)
    : dim_(dim),
      rule_(rule),
      shadows_(shadows),
      state_elements_(state_elements_of(rule, dim)),
      floats_(dim + state_elements_ + (shadows ? dim : 0) + 1),
      places_(floats_) {}

const float* GeoSlots::find_trained(int64_t key) const {
  auto& places = const_cast<RowPlaces&>(places_);
  const Slot* const slot = places.find(key);
  return slot == nullptr ? nullptr : places.values(*slot);
}

void GeoSlots::add(std::span<const int64_t> keys, const float* rows) {
  places_.reserve(keys.size());
  // Nothing throws any more.
  for (size_t i = 0; i < keys.size(); ++i) {
    const Slot& slot = places_.take_with_values(keys[i], RowPlaces::hash_of(keys[i]));
    const float* row = rows + i * dim_;
    std::copy_n(row, dim_, weight(slot));
    if (state_elements_ > 0) kernels::init_state(rule_, state(slot), dim_, dim_);
    if (shadows_) std::copy_n(row, dim_, shadow(slot));
    set_count(slot, 0);
  }
}

bool GeoSlots::has_residue(const Slot& slot) {
  if (!shadows_) return false;
  const float* const x = weight(slot);
  const float* const y = shadow(slot);
  for (uint32_t i = 0; i < dim_; ++i) {
    // What is no number is none on the servers either.
    if (x[i] != y[i] && x[i] == x[i]) return true;
  }
  return false;
}

std::vector<int64_t> GeoSlots::keys() {
  std::vector<int64_t> found;
  found.reserve(size());
  each([&found](const Slot& slot) { found.push_back(slot.key); });
  return found;
}

}  // namespace cpudist::client
