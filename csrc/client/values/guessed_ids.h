// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Ids that a lookup is likely to be given: a part of an input of the model, where it lies.
#pragma once

#include <cstdint>
#include <vector>

namespace cpudist::client {

enum class IdType : uint8_t { kInt64 = 0, kInt32 = 1, kFloat32 = 2, kFloat64 = 3 };

// Elements of a tensor, of one table: sizes and strides, in elements, of each of its dimensions.
struct GuessedIds {
  uint32_t table = 0;
  const void* first = nullptr;
  IdType type = IdType::kInt64;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// Writes them to `ids`, as torch's cast to int64 makes them. False for a number that is no id.
bool read_ids(const GuessedIds& guess, std::vector<int64_t>* ids);

}  // namespace cpudist::client
