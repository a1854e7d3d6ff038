// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/update/finite.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "kernels/elementwise.h"

namespace cpudist::server {
namespace {

template <typename T>
std::string name_of(T value) {
  if (std::isnan(value)) return "NaN";
  return value < 0 ? "-infinity" : "infinity";
}

template <typename T>
std::string describe_block(const wire::BlockSpec& block, std::span<const uint8_t> values) {
  const auto* const first = reinterpret_cast<const T*>(values.data());
  const size_t count = values.size() / sizeof(T);
  if (kernels::all_finite(first, count)) return "";
  const T* const found =
      std::find_if_not(first, first + count, [](T value) { return std::isfinite(value); });
  const uint64_t element = block.offset + static_cast<uint64_t>(found - first);
  return "a gradient of parameter " + block.name + " that is " + name_of(*found) + " at element " +
         std::to_string(element);
}

std::string describe_rows(const wire::TableSpec& table, const wire::TableSection& section) {
  const float* const first = section.rows.data();
  const size_t count = section.rows.size();
  if (kernels::all_finite(first, count)) return "";
  const float* const found =
      std::find_if_not(first, first + count, [](float value) { return std::isfinite(value); });
  const auto at = static_cast<size_t>(found - first);
  return "a gradient of table " + table.name + " that is " + name_of(*found) +
         " in the row of id " + std::to_string(section.keys[at / table.dim]);
}

}  // namespace

std::string describe_nonfinite(const wire::PushView& push, const wire::ParamSetLayout& layout) {
  for (const wire::DenseSection& section : push.blocks) {
    const wire::BlockSpec& block = layout.blocks[section.block];
    const std::string found = block.dtype == wire::DType::kFloat64
                                  ? describe_block<double>(block, section.values)
                                  : describe_block<float>(block, section.values);
    if (!found.empty()) return found;
  }
  for (const wire::TableSection& section : push.tables) {
    const std::string found = describe_rows(layout.tables[section.table], section);
    if (!found.empty()) return found;
  }
  return "";
}

}  // namespace cpudist::server
