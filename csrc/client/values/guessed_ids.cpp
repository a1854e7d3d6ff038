// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "client/values/guessed_ids.h"

#include <cstddef>
#include <type_traits>

namespace cpudist::client {

namespace {

// Whole numbers up to here are exact in a double, and no table has so many rows.
constexpr double kMostOfFloats = 9007199254740992.0;

template <typename T>
bool to_id(T value, int64_t* id) {
  if constexpr (std::is_floating_point_v<T>) {
    // In this form a nan does not pass.
    if (!(value > T{-1} && value < static_cast<T>(kMostOfFloats))) return false;
  }
  *id = static_cast<int64_t>(value);
  return true;
}

// Reads dimension `dim` and those behind it.
template <typename T>
bool read_dim(const GuessedIds& guess, size_t dim, const T* at, int64_t** to) {
  if (dim == guess.sizes.size()) return to_id(*at, (*to)++);
  const int64_t stride = guess.strides[dim];
  const int64_t size = guess.sizes[dim];
  if (dim + 1 < guess.sizes.size()) {
    for (int64_t i = 0; i < size; ++i) {
      if (!read_dim(guess, dim + 1, at + i * stride, to)) return false;
    }
    return true;
  }
  for (int64_t i = 0; i < size; ++i) {
    if (!to_id(at[i * stride], (*to)++)) return false;
  }
  return true;
}

template <typename T>
bool read_as(const GuessedIds& guess, int64_t* to) {
  return read_dim(guess, 0, static_cast<const T*>(guess.first), &to);
}

}  // namespace

bool read_ids(const GuessedIds& guess, std::vector<int64_t>* ids) {
  int64_t count = 1;
  for (const int64_t size : guess.sizes) count *= size;
  ids->resize(static_cast<size_t>(count));
  if (count == 0) return true;
  switch (guess.type) {
    case IdType::kInt64:
      return read_as<int64_t>(guess, ids->data());
    case IdType::kInt32:
      return read_as<int32_t>(guess, ids->data());
    case IdType::kFloat32:
      return read_as<float>(guess, ids->data());
    case IdType::kFloat64:
      return read_as<double>(guess, ids->data());
  }
  return false;
}

}  // namespace cpudist::client
