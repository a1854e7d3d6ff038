// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/push/residues.h"

#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "base/errors.h"
#include "kernels/elementwise.h"
#include "kernels/quantize.h"
#include "wire/codec/values.h"

namespace cpudist::client {
namespace {

constexpr size_t kRowsAhead = 8;
// Of places, which are half full.
constexpr size_t kPlaceBytes = 2 * sizeof(RowPlaces::Place);

// Values of a payload that this process has packed and not shared yet.
template <typename T>
float* floats_of(std::span<const T> values) {
  return reinterpret_cast<float*>(const_cast<T*>(values.data()));
}

}  // namespace

Residues::Residues(const wire::ParamSetLayout& layout, uint64_t limit_bytes)
    : layout_(layout), limit_bytes_(limit_bytes) {
  for (const wire::TableSpec& table : layout.tables) {
    if (table.remote || table.rows < std::numeric_limits<uint32_t>::max()) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "table '" + table.name + "': " + std::to_string(table.rows) +
                    " rows, at most 2^32 - 2 where pushes are rounded; set wire_dtype to 'fp32'");
  }
}

float* Residues::find(Rows& rows, int64_t key, uint32_t dim) {
  uint32_t& slot = rows.slots[static_cast<size_t>(key)];
  if (slot == 0) {
    if (rows.count % kSlabRows == 0) rows.slabs.emplace_back(size_t{kSlabRows} * dim);
    slot = ++rows.count;
  }
  const uint32_t at = slot - 1;
  return rows.slabs[at / kSlabRows].data() + size_t{at % kSlabRows} * dim;
}

float* Residues::find(RecentRows& rows, int64_t key, uint32_t dim) {
  RowPlaces::Place& place = rows.recent.take(key);
  if (place.row != 0) return rows.recent.values(place);
  float* const held = rows.recent.add_values(place);
  const RowPlaces::Place* const earlier = rows.earlier.find(key);
  if (earlier == nullptr) {
    std::memset(held, 0, dim * sizeof(float));
  } else {
    std::memcpy(held, rows.earlier.values(*earlier), dim * sizeof(float));
    ++rows.moved;
  }
  return held;
}

uint64_t Residues::begin() {
  uint64_t size_bytes = 0;
  for (const auto& [table, rows] : remote_) {
    size_bytes += rows.recent.values_bytes() + rows.recent.size() * kPlaceBytes;
  }
  if (size_bytes <= limit_bytes_ / 2) return 0;
  uint64_t dropped = 0;
  for (auto& [table, rows] : remote_) {
    const uint64_t here = rows.earlier.size() - rows.moved;
    rows.earlier.clear();  // before the swap: what it throws leaves all as it was
    rows.moved = 0;
    std::swap(rows.recent, rows.earlier);
    dropped += here;
  }
  return dropped;
}

void Residues::find_all(uint32_t table, std::span<const int64_t> keys, std::span<float*> held) {
  const wire::TableSpec& spec = layout_.tables[table];
  const size_t count = keys.size();
  if (spec.remote) {
    RecentRows& rows = remote_.try_emplace(table, spec.dim).first->second;
    for (size_t i = 0; i < count; ++i) held[i] = find(rows, keys[i], spec.dim);
    return;
  }
  const auto [entry, fresh] = tables_.try_emplace(table);
  Rows& rows = entry->second;
  if (fresh) rows.slots = kernels::AlignedBuffer<uint32_t>(static_cast<size_t>(spec.rows));
  for (size_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < count) {
      __builtin_prefetch(&rows.slots[static_cast<size_t>(keys[i + kRowsAhead])], 1);
    }
    held[i] = find(rows, keys[i], spec.dim);
  }
}

void Residues::round_table(const wire::TableSection& section, float* gradients) {
  const wire::TableSpec& spec = layout_.tables[section.table];
  const size_t count = section.keys.size();
  std::vector<float*> held(count);
  find_all(section.table, section.keys, held);
  for (size_t i = 0; i < count; ++i) {
    float* gradient = gradients + i * spec.dim;
    kernels::add(gradient, held[i], spec.dim);
    std::memcpy(held[i], gradient, spec.dim * sizeof(float));
  }
  round_rows(layout_.push_dtype, gradients, count, spec.dim);
  for (size_t i = 0; i < count; ++i) {
    kernels::residue_of(held[i], gradients + i * spec.dim, held[i], spec.dim);
  }
}

void Residues::round_block_of(const wire::DenseSection& section, float* gradient) {
  const wire::BlockSpec& spec = layout_.blocks[section.block];
  const auto n = static_cast<size_t>(spec.elements);
  const auto [entry, fresh] = blocks_.try_emplace(section.block);
  if (fresh) entry->second = kernels::AlignedBuffer<float>(n);
  float* held = entry->second.data();
  if (n == 0) return;
  kernels::add(gradient, held, n);
  std::memcpy(held, gradient, n * sizeof(float));
  round_block(layout_.push_dtype, gradient, n);
  kernels::residue_of(held, gradient, held, n);
}

Residues::Held Residues::rows_of(uint32_t table) {
  const size_t dim = layout_.tables[table].dim;
  Held held;
  const auto add = [&](int64_t key, const float* values) {
    held.keys.push_back(key);
    held.values.insert(held.values.end(), values, values + dim);
  };
  if (const auto found = remote_.find(table); found != remote_.end()) {
    RecentRows& rows = found->second;
    rows.recent.each(add);
    rows.earlier.each([&](int64_t key, const float* values) {
      if (rows.recent.find(key) == nullptr) add(key, values);
    });
  }
  if (const auto found = tables_.find(table); found != tables_.end()) {
    Rows& rows = found->second;
    for (size_t key = 0; key < rows.slots.size(); ++key) {
      if (rows.slots[key] == 0) continue;
      add(static_cast<int64_t>(key),
          find(rows, static_cast<int64_t>(key), static_cast<uint32_t>(dim)));
    }
  }
  return held;
}

std::span<const float> Residues::block(uint32_t block) const {
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) return {};
  return {found->second.data(), found->second.size()};
}

void Residues::clear() {
  tables_.clear();
  remote_.clear();
  blocks_.clear();
}

void Residues::put_rows(uint32_t table, std::span<const int64_t> keys, const float* values) {
  const wire::TableSpec& spec = layout_.tables[table];
  const size_t dim = spec.dim;
  for (const int64_t key : keys) {
    if (spec.has_key(key)) continue;
    throw Error(ErrorCode::kRowOutOfRange, "what is held back of row " + std::to_string(key) +
                                               " of table '" + spec.name + "', which has " +
                                               std::to_string(spec.rows) + " rows");
  }
  std::vector<float*> held(keys.size());
  find_all(table, keys, held);
  for (size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(held[i], values + i * dim, dim * sizeof(float));
  }
}

void Residues::put_block(uint32_t block, const float* values) {
  const auto n = static_cast<size_t>(layout_.blocks[block].elements);
  kernels::AlignedBuffer<float> held(n);
  if (n > 0) std::memcpy(held.data(), values, n * sizeof(float));
  blocks_.insert_or_assign(block, std::move(held));
}

void Residues::round(Buffer* push) {
  const wire::PushView view = wire::decode_push(push->bytes(), layout_);
  const bool counts = view.header.weight > 0;
  for (const wire::DenseSection& section : view.blocks) {
    const wire::BlockSpec& spec = layout_.blocks[section.block];
    if (spec.dtype == wire::DType::kFloat64) continue;
    float* gradient = floats_of(section.values);
    if (counts) {
      round_block_of(section, gradient);
    } else {
      round_block(layout_.push_dtype, gradient, spec.elements);
    }
  }
  for (const wire::TableSection& section : view.tables) {
    if (counts) {
      round_table(section, floats_of(section.rows));
    } else {
      round_rows(layout_.push_dtype, floats_of(section.rows), section.keys.size(),
                 layout_.tables[section.table].dim);
    }
  }
}

}  // namespace cpudist::client
