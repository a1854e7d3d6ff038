// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The algebra of an exchange, a slice at a time: what a trainer hands on, and what it takes in.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "client/geo/exchange.h"
#include "kernels/elementwise.h"
#include "wire/codec/values.h"

namespace cpudist::client {
namespace {

constexpr size_t kPrefetchRows = 8;

}  // namespace

template <typename T>
T* GeoExchange::weight_of(const wire::BlockSpec& block, std::span<void* const> weights,
                          uint64_t element) const {
  return static_cast<T*>(weights[block.parameter]) + block.offset + element;
}

template <typename T>
T* GeoExchange::shadow_of(const wire::BlockSpec& block, uint64_t element) {
  return reinterpret_cast<T*>(dense_shadows_[block.parameter].data()) + block.offset + element;
}

void GeoExchange::pack(const Slice& slice, std::span<void* const> weights) {
  slice.part == Part::kBlock ? pack_block(slice, weights) : pack_rows(slice);
}

template <typename T, typename Round>
void GeoExchange::hand_on(T* weight, T* shadow, T* negated, size_t count, const Round& round,
                          T* agreed) {
  const bool lossy = dtype() != wire::WireDType::kFloat32 && std::is_same_v<T, float>;
  const auto divisor = static_cast<T>(divisor_);
  if (lossy) unmoved_.assign(shadow, shadow + count);
  kernels::take_delta(weight, shadow, divisor, negated, count);
  const auto shadow_moves = [&](T share) {
    std::copy(unmoved_.begin(), unmoved_.end(), shadow);
    kernels::accumulate(shadow, negated, -share, count);
  };
  if (lossy) {
    round(negated);
    shadow_moves(1);  // what rounding leaves stays in weight - shadow
  }
  if (!averages_) return;
  if (agreed != nullptr) std::copy_n(shadow, count, agreed);
  lossy ? shadow_moves(divisor) : void(std::copy_n(weight, count, shadow));
}

void GeoExchange::pack_block(const Slice& slice, std::span<void* const> weights) {
  Outgoing& out = outgoing_[slice.server];
  const size_t count = slice.end - slice.begin;
  const wire::BlockSpec& block = set_.layout.blocks[out.blocks[slice.index]];
  uint8_t* target = out.filled.blocks[slice.index];
  // The answer has every dense value: nothing has to be kept for it.
  if (block.dtype == wire::DType::kFloat64) {
    hand_on<double>(
        weight_of<double>(block, weights, slice.begin), shadow_of<double>(block, slice.begin),
        reinterpret_cast<double*>(target) + slice.begin, count, [](double*) {}, nullptr);
    return;
  }
  // A slice begins where a scale does.
  const auto round = [&](float* values) { round_block(dtype(), values, count); };
  hand_on<float>(weight_of<float>(block, weights, slice.begin),
                 shadow_of<float>(block, slice.begin),
                 reinterpret_cast<float*>(target) + slice.begin, count, round, nullptr);
}

void GeoExchange::pack_rows(const Slice& slice) {
  Outgoing& out = outgoing_[slice.server];
  GeoTable& table = tables_[slice.index];
  const size_t dim = table.spec().dim;
  float* weight = set_.table(slice.index).weight();
  const int64_t* keys = out.keys[slice.index].data();
  Agreed* agreed = averages_ ? &agreed_[slice.server * tables_.size() + slice.index] : nullptr;
  const auto round = [&](float* row) { round_rows(dtype(), row, 1, dim); };
  for (uint64_t i = slice.begin; i < slice.end; ++i) {
    if (i + kPrefetchRows < slice.end) {
      __builtin_prefetch(weight + static_cast<size_t>(keys[i + kPrefetchRows]) * dim);
      __builtin_prefetch(table.shadow(keys[i + kPrefetchRows]), 1);
    }
    out.filled.keys[slice.index][i] = keys[i];
    hand_on<float>(weight + static_cast<size_t>(keys[i]) * dim, table.shadow(keys[i]),
                   out.filled.rows[slice.index] + i * dim, dim, round,
                   agreed == nullptr ? nullptr : agreed->rows.data() + i * dim);
  }
}

void GeoExchange::apply(const Slice& slice, std::span<void* const> weights) {
  if (slice.part == Part::kAgreed) {
    const Agreed& agreed = agreed_[slice.index];
    apply_rows(slice, agreed.table, agreed.keys, agreed.rows);
    return;
  }
  const wire::ChangesView& view = views_[slice.server];
  if (slice.part == Part::kRows) {
    const wire::TableSection& section = view.tables[slice.index];
    apply_rows(slice, section.table, section.keys, section.rows);
    return;
  }
  const size_t count = slice.end - slice.begin;
  const wire::DenseSection& section = view.blocks[slice.index];
  const wire::BlockSpec& block = set_.layout.blocks[section.block];
  if (block.dtype == wire::DType::kFloat64) {
    kernels::merge_fresh(
        weight_of<double>(block, weights, slice.begin), shadow_of<double>(block, slice.begin),
        reinterpret_cast<const double*>(section.values.data()) + slice.begin, count);
  } else {
    kernels::merge_fresh(
        weight_of<float>(block, weights, slice.begin), shadow_of<float>(block, slice.begin),
        reinterpret_cast<const float*>(section.values.data()) + slice.begin, count);
  }
}

void GeoExchange::apply_rows(const Slice& slice, uint32_t index, std::span<const int64_t> keys,
                             std::span<const float> rows) {
  GeoTable& table = tables_[index];
  const size_t dim = table.spec().dim;
  float* weight = set_.table(index).weight();
  for (uint64_t i = slice.begin; i < slice.end; ++i) {
    float* row = weight + static_cast<size_t>(keys[i]) * dim;
    const float* fresh = rows.data() + i * dim;
    if (float* shadow = table.shadow(keys[i])) {
      kernels::merge_fresh(row, shadow, fresh, dim);
    } else {
      std::memcpy(row, fresh, dim * sizeof(float));
    }
  }
}

}  // namespace cpudist::client
