// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Places by key, against a map of the standard library that is told the same.

#include "client/cache/row_places.h"

#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "support/check.h"

namespace row_places_test {

using cpudist::client::RowPlaces;

constexpr uint32_t kDim = 5;
constexpr int64_t kHighest = (int64_t{1} << 54) - 1;

struct Known {
  uint32_t stamp = 0;
  bool has_values = false;
  float value = 0;
};
using Model = std::unordered_map<int64_t, Known>;

// Few keys, so that they repeat, and with the ends of what keys may be.
int64_t draw_key(std::mt19937_64& engine) {
  static const std::vector<int64_t> ends{
      0, 1, -1, kHighest, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  const uint64_t drawn = engine();
  if (drawn % 16 == 0) return ends[(drawn >> 8) % ends.size()];
  // In runs, and far apart.
  const auto near = static_cast<int64_t>((drawn >> 8) % 1500);
  return drawn % 2 == 0 ? near : near << 40;
}

void set_values(RowPlaces& places, RowPlaces::Place& place, float value) {
  float* const values = place.row == 0 ? places.add_values(place) : places.values(place);
  std::fill_n(values, kDim, value);
}

void check_equal(RowPlaces& places, const Model& model) {
  CHECK_EQ(places.size(), model.size());
  size_t rows = 0;
  for (const auto& [key, known] : model) {
    RowPlaces::Place* const place = places.find(key);
    CHECK(place != nullptr);
    CHECK_EQ(place->key, key);
    CHECK_EQ(place->mark.stamp, known.stamp);
    CHECK_EQ(place->row != 0, known.has_values);
    if (!known.has_values) continue;
    ++rows;
    CHECK(place->row <= places.rows());
    for (uint32_t d = 0; d < kDim; ++d) CHECK_EQ(places.values(*place)[d], known.value);
  }
  CHECK_EQ(places.rows(), rows);
}

// One of what may happen, by chance; forgetting is rare.
void act(RowPlaces& places, Model& model, std::mt19937_64& engine) {
  const uint64_t what = engine() % 2000;
  const int64_t key = draw_key(engine);
  const auto number = static_cast<uint32_t>(engine());
  const auto is_odd = [](uint32_t stamp) { return stamp % 2 == 1; };
  if (what < 500) {
    RowPlaces::Place* const place = places.find(key);
    CHECK_EQ(place != nullptr, model.contains(key));
  } else if (what < 1000) {
    places.take(key).mark.stamp = number;
    model[key].stamp = number;
  } else if (what < 1500) {
    set_values(places, places.take(key), static_cast<float>(number % 1000));
    model[key].has_values = true;
    model[key].value = static_cast<float>(number % 1000);
  } else if (what < 1990) {
    places.reserve(1);
    RowPlaces::Place& place = places.take_with_values(key, RowPlaces::hash_of(key));
    set_values(places, place, static_cast<float>(number % 1000));
    Known& known = model[key];
    CHECK_EQ(place.mark.stamp, known.stamp);
    known.has_values = true;
    known.value = static_cast<float>(number % 1000);
  } else if (what < 1993) {
    places.clear();
    model.clear();
  } else if (what < 1997) {
    places.retain([&](const RowPlaces::Place& place) { return is_odd(place.mark.stamp); });
    std::erase_if(model, [&](const auto& entry) { return !is_odd(entry.second.stamp); });
  } else {
    places.drop_values([&](const RowPlaces::Place& place) { return is_odd(place.mark.stamp); });
    for (auto& [other, known] : model) known.has_values &= is_odd(known.stamp);
  }
}

TEST(client_row_places_are_a_map_whatever_happens) {
  // The count of clear() passes its end on the way.
  for (const uint32_t epoch : {1u, 0xfffffff0u}) {
    std::mt19937_64 engine(epoch);
    RowPlaces places(kDim, epoch);
    Model model;
    const int actions = cpudist::testing::kInstrumented ? 20000 : 200000;
    for (int i = 0; i < actions; ++i) {
      act(places, model, engine);
      if (i % 997 == 0) check_equal(places, model);
    }
    check_equal(places, model);
  }
}

TEST(client_row_places_values_stay_where_they_are_while_others_come) {
  RowPlaces places(kDim);
  std::vector<const float*> addresses;
  for (int64_t key = 0; key < 30000; ++key) {
    RowPlaces::Place& place = places.take(key);
    set_values(places, place, static_cast<float>(key));
    addresses.push_back(places.values(place));
  }
  for (int64_t key = 0; key < 30000; ++key) {
    CHECK_EQ(places.values(*places.find(key)), addresses[static_cast<size_t>(key)]);
    CHECK_EQ(*addresses[static_cast<size_t>(key)], static_cast<float>(key));
  }
}

TEST(client_row_places_take_memory_for_what_the_last_steps_named) {
  RowPlaces places(kDim);
  const size_t least = places.memory_bytes();
  const auto fill = [&](int64_t count) {
    for (int64_t key = 0; key < count; ++key) set_values(places, places.take(key * 77), 1.0f);
  };
  fill(200000);
  const size_t most = places.memory_bytes();
  CHECK(most < 200000 * (kDim * sizeof(float) + 4 * sizeof(RowPlaces::Place)) + least);
  // A step like it finds the memory there.
  places.clear();
  fill(200000);
  CHECK_EQ(places.memory_bytes(), most);
  // Held rows go on through a small step, and no others.
  places.clear();
  fill(100);
  const auto first_fifty = [](const RowPlaces::Place& place) { return place.key < 50 * 77; };
  places.retain(first_fifty);
  CHECK_EQ(places.size(), 50u);
  CHECK(places.memory_bytes() < most / 20);
  places.drop_values([](const RowPlaces::Place&) { return false; });
  CHECK_EQ(places.rows(), 0u);
  CHECK_EQ(places.size(), 50u);
  places.clear();
  places.take(1);
  places.clear();
  CHECK_EQ(places.memory_bytes(), least);
}

}  // namespace row_places_test
