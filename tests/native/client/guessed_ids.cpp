// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Parts of tensors that are read as ids.
#include "client/values/guessed_ids.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/check.h"

namespace {

using cpudist::client::GuessedIds;
using cpudist::client::IdType;

using Ids = std::vector<int64_t>;

template <typename T>
GuessedIds part_of(const std::vector<T>& values, IdType type, Ids sizes, Ids strides) {
  return {0, values.data(), type, std::move(sizes), std::move(strides)};
}

Ids ids_of(const GuessedIds& guess) {
  Ids ids{99};
  CHECK(read_ids(guess, &ids));
  return ids;
}

template <typename T>
bool is_id(T value, IdType type) {
  const std::vector<T> values{1, value};
  Ids ids;
  return read_ids(part_of(values, type, {2}, {1}), &ids);
}

}  // namespace

TEST(guessed_ids_are_read_by_sizes_and_strides) {
  std::vector<int64_t> matrix(12);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<int64_t>(i);
  CHECK(ids_of(part_of(matrix, IdType::kInt64, {3}, {4})) == (Ids{0, 4, 8}));
  CHECK(ids_of(part_of(matrix, IdType::kInt64, {3, 2}, {4, 1})) == (Ids{0, 1, 4, 5, 8, 9}));
  CHECK(ids_of(part_of(matrix, IdType::kInt64, {2, 3, 1}, {1, 4, 7})) == (Ids{0, 4, 8, 1, 5, 9}));
  CHECK(ids_of(part_of(matrix, IdType::kInt64, {}, {})) == Ids{0});
  CHECK(ids_of(part_of(matrix, IdType::kInt64, {3, 0}, {4, 1})).empty());
  CHECK(ids_of(part_of(matrix, IdType::kInt64, {0, 3}, {4, 1})).empty());
}

TEST(guessed_ids_are_cast_as_torch_casts_them) {
  CHECK(ids_of(part_of(std::vector<int32_t>{3, -1}, IdType::kInt32, {2}, {1})) == (Ids{3, -1}));
  const std::vector<float> floats{2.0f, 2.9f, -0.5f};
  CHECK(ids_of(part_of(floats, IdType::kFloat32, {3}, {1})) == (Ids{2, 2, 0}));
  const std::vector<double> doubles{4503599627370497.0, 0.0};
  CHECK(ids_of(part_of(doubles, IdType::kFloat64, {2}, {1})) == (Ids{4503599627370497, 0}));
}

TEST(guessed_ids_are_none_where_a_number_is_no_id) {
  CHECK(is_id(1e9f, IdType::kFloat32));
  CHECK(!is_id(-1.0f, IdType::kFloat32));
  CHECK(!is_id(1e20f, IdType::kFloat32));
  CHECK(!is_id(std::numeric_limits<float>::quiet_NaN(), IdType::kFloat32));
  CHECK(!is_id(std::numeric_limits<double>::infinity(), IdType::kFloat64));
  CHECK(!is_id(-std::numeric_limits<double>::infinity(), IdType::kFloat64));
}
