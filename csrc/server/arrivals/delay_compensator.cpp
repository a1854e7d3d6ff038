// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Keeping what was read, and finding it again for the gradient that was computed on it.

#include "server/arrivals/delay_compensator.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <utility>

#include "kernels/elementwise.h"
#include "kernels/hash.h"

namespace cpudist::server {
namespace {

constexpr size_t kPrefetchBackups = 8;
// Prefetches of a trainer whose rows are kept: more than it may have outstanding.
constexpr std::ptrdiff_t kMostPrefetches = 20;

template <typename T>
kernels::AdaptiveScalars<T> scalars_of(const wire::DelayCompensation& settings) {
  return {static_cast<T>(settings.factor), static_cast<T>(settings.momentum),
          static_cast<T>(1.0 - settings.momentum), static_cast<T>(settings.epsilon)};
}

}  // namespace

std::unique_ptr<DelayCompensator> make_compensator(const wire::ParamSetLayout& layout) {
  if (layout.compensation.kind == wire::Compensation::kNone) return nullptr;
  return std::make_unique<DelayCompensator>(layout);
}

DelayCompensator::DelayCompensator(const wire::ParamSetLayout& layout)
    : layout_(layout),
      settings_(layout.compensation),
      block_means_(layout.blocks.size()),
      row_means_(layout.tables.size()),
      rows_(layout.tables.size()),
      blocks_(layout.blocks.size()) {}

DelayCompensator::Reads& DelayCompensator::reads_of(uint32_t rank) {
  const std::lock_guard lock(mutex_);
  auto& reads = reads_[rank];
  if (reads == nullptr) reads = std::make_unique<Reads>();
  return *reads;
}

void DelayCompensator::note_rows(uint32_t rank, uint64_t step, uint64_t request,
                                 const wire::PullTable& pull, float* rows) {
  if (step == 0) return;
  Reads& reads = reads_of(rank);
  const size_t dim = layout_.tables[pull.table].dim;
  const uint64_t salt = kernels::table_salt(layout_.tables[pull.table].name);
  const std::lock_guard lock(reads.mutex);
  if (step <= reads.applied) return;  // a request that was overtaken
  if ((step & wire::kPrefetchBit) != 0 && step < reads.kept_from) return;
  auto& tables = reads.rows[step];
  const auto oldest = reads.rows.lower_bound(wire::kPrefetchBit);
  if (std::distance(oldest, reads.rows.end()) > kMostPrefetches) {
    const bool is_this = oldest->first == step;
    reads.rows.erase(oldest);
    if (is_this) return;
  }
  TableRead& read = tables.try_emplace(pull.table).first->second;
  const size_t most = read.rows.size() + pull.keys.size() * dim;
  if (read.rows.capacity() < most) read.rows.reserve(std::max(most, 2 * read.rows.size()));
  const size_t most_keys = read.keys.size() + pull.keys.size();
  if (read.keys.capacity() < most_keys) {
    read.keys.reserve(std::max(most_keys, 2 * read.keys.size()));
  }
  const bool repeated = !read.requests.insert(request).second;
  for (size_t i = 0; i < pull.keys.size(); ++i) {
    const uint64_t hash = kernels::hash_of(pull.keys[i], salt);
    const uint32_t position = read.find(pull.keys[i], hash);
    float* row = rows + i * dim;
    if (position != table::RowIndex::kNone) {
      float* kept = read.rows.data() + position * dim;
      std::memcpy(repeated ? row : kept, repeated ? kept : row, dim * sizeof(float));
      continue;
    }
    // It alone may find no memory: what is below has been reserved.
    read.index.insert(hash, static_cast<uint32_t>(read.keys.size()));
    read.rows.insert(read.rows.end(), row, row + dim);
    read.keys.push_back(pull.keys[i]);
  }
}

void DelayCompensator::note_dense(uint32_t rank, DenseRead read) {
  Reads& reads = reads_of(rank);
  const std::lock_guard lock(reads.mutex);
  std::erase_if(reads.dense, [&](const DenseRead& other) {
    const bool superseded = read.pulled_for != 0 && other.pulled_for == read.pulled_for &&
                            other.request != read.request;
    return other.version == read.version || (superseded && other.version < read.version);
  });
  reads.dense.push_back(std::move(read));
}

void DelayCompensator::note_dense_pull(uint32_t rank, uint64_t step, uint64_t request,
                                       uint64_t version, const Buffer& reply) {
  if (step != 0) note_dense(rank, {version, step, request, reply.share()});
}

void DelayCompensator::note_dense_reply(uint32_t rank, uint64_t version, const Buffer& reply) {
  note_dense(rank, {version, 0, 0, reply.share()});
}

void DelayCompensator::forget(uint32_t rank) {
  const std::lock_guard lock(mutex_);
  reads_.erase(rank);
}

void DelayCompensator::forget_all() {
  const std::lock_guard lock(mutex_);
  reads_.clear();
  for (auto& means : block_means_) means = {};
  for (auto& parts : row_means_) parts.clear();
}

void DelayCompensator::forget_rows(const table::Table& table,
                                   std::span<const table::Freed> rows) noexcept {
  const uint64_t salt = table.shape().salt;
  const std::lock_guard lock(mutex_);
  for (auto& [rank, reads] : reads_) {
    const std::lock_guard reads_lock(reads->mutex);
    for (auto& [step, tables] : reads->rows) {
      const auto read = tables.find(table.id());
      if (read == tables.end()) continue;
      for (const table::Freed& row : rows) {
        const uint64_t hash = kernels::hash_of(row.key, salt);
        const uint32_t position = read->second.find(row.key, hash);
        if (position != table::RowIndex::kNone) read->second.index.erase(hash, position);
      }
    }
  }
  for (const table::Freed& row : rows) {
    if (row.record / table.rows_per_slab() >= row_means_[table.id()].size()) continue;
    std::fill_n(row_means(table, row.record), table.dim(), 0.0f);
  }
}

uint64_t DelayCompensator::size_bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t total = 0;
  for (const auto& [rank, reads] : reads_) {
    const std::lock_guard reads_lock(reads->mutex);
    for (const auto& [step, tables] : reads->rows) {
      for (const auto& [table, read] : tables) {
        total += read.index.size_bytes() + read.keys.capacity() * sizeof(int64_t) +
                 read.rows.capacity() * sizeof(float);
      }
    }
    for (const DenseRead& read : reads->dense) total += read.reply.size();
  }
  for (const auto& means : block_means_) total += means.size();
  for (const auto& parts : row_means_) {
    for (const auto& means : parts) total += means.size() * sizeof(float);
  }
  return total;
}

void DelayCompensator::find_dense(const Reads& reads, uint64_t version) {
  for (const DenseRead& read : reads.dense) {
    if (read.version != version) continue;
    const wire::DenseView view =
        wire::decode_dense({read.reply.data(), read.reply.size()}, layout_);
    for (const wire::DenseSection& section : view.blocks) {
      blocks_[section.block] = section.values.data();
    }
  }
}

void DelayCompensator::make_room(const table::ParamStore& store) {
  for (size_t block = 0; block < store.blocks.size(); ++block) {
    if (store.blocks[block] == nullptr || !block_means_[block].empty()) continue;
    block_means_[block] = kernels::AlignedBuffer<uint8_t>(store.blocks[block]->weight().size());
  }
  for (size_t table = 0; table < store.tables.size(); ++table) {
    auto& parts = row_means_[table];
    const table::Table& rows = *store.tables[table];
    while (parts.size() < rows.slab_count()) {
      parts.emplace_back(size_t{rows.rows_per_slab()} * rows.dim());
    }
  }
}

float* DelayCompensator::row_means(const table::Table& table, uint32_t record) {
  const uint32_t part = record / table.rows_per_slab();
  const uint32_t row = record - part * table.rows_per_slab();
  return row_means_[table.id()][part].data() + size_t{row} * table.dim();
}

void DelayCompensator::begin(uint32_t rank, const wire::PushView& push,
                             const table::ParamStore& store) {
  if (adaptive()) make_room(store);
  current_ = &reads_of(rank);
  step_ = push.header.step;
  version_ = push.header.round;
  kept_from_ = push.holds.kept_from | wire::kPrefetchBit;
  for (auto& reads : rows_) reads.clear();
  const auto add_rows = [this](uint64_t read_for) {
    const auto tables = current_->rows.find(read_for);
    if (tables == current_->rows.end()) return;
    for (const auto& [table, read] : tables->second) rows_[table].push_back(&read);
  };
  add_rows(step_);
  for (const uint64_t prefetch : push.holds.used) add_rows(prefetch | wire::kPrefetchBit);
  std::fill(blocks_.begin(), blocks_.end(), nullptr);
  find_dense(*current_, version_);
}

void DelayCompensator::end() {
  current_->applied = std::max(current_->applied, step_);
  auto& rows = current_->rows;
  rows.erase(rows.begin(), rows.upper_bound(step_));
  current_->kept_from = std::max(current_->kept_from, kept_from_);
  rows.erase(rows.lower_bound(wire::kPrefetchBit), rows.lower_bound(current_->kept_from));
  // Those of this version stay: the next gradient may be computed on them too.
  std::erase_if(current_->dense, [this](const DenseRead& read) { return read.version < version_; });
  current_ = nullptr;
}

const void* DelayCompensator::correct(const table::DenseBlock& block, const void* gradient,
                                      void* out) {
  if (block.spec().dtype == wire::DType::kFloat64) {
    return compensate_block(block, static_cast<const double*>(gradient), static_cast<double*>(out));
  }
  return compensate_block(block, static_cast<const float*>(gradient), static_cast<float*>(out));
}

template <typename T>
const T* DelayCompensator::compensate_block(const table::DenseBlock& block, const T* gradient,
                                            T* out) {
  const size_t count = block.spec().elements;
  const auto* weight = reinterpret_cast<const T*>(block.weight().data());
  const auto* read = reinterpret_cast<const T*>(blocks_[block.id()]);
  if (adaptive()) {
    kernels::compensate_adaptive(out, gradient, weight, read == nullptr ? weight : read,
                                 reinterpret_cast<T*>(block_means_[block.id()].data()),
                                 scalars_of<T>(settings_), count);
    return out;
  }
  if (read == nullptr) return gradient;
  kernels::compensate(out, gradient, weight, read, static_cast<T>(settings_.factor), count);
  return out;
}

void DelayCompensator::correct(const table::Table& table, std::span<const int64_t> records,
                               const float** gradients, float* out) {
  const std::vector<const TableRead*>& reads = rows_[table.id()];
  if (reads.empty() && !adaptive()) return;
  const size_t dim = table.dim();
  const uint64_t salt = kernels::table_salt(table.spec().name);
  const auto key_of = [&](size_t i) { return table.header(static_cast<uint32_t>(records[i])).key; };
  const auto scalars = scalars_of<float>(settings_);
  for (size_t i = 0; i < records.size(); ++i) {
    const float* row = nullptr;
    for (const TableRead* read : reads) {
      if (i + kPrefetchBackups < records.size()) {
        read->index.prefetch(kernels::hash_of(key_of(i + kPrefetchBackups), salt));
      }
      const int64_t key = key_of(i);
      const uint32_t position = read->find(key, kernels::hash_of(key, salt));
      if (position == table::RowIndex::kNone) continue;
      row = read->rows.data() + position * dim;
      break;
    }
    if (row == nullptr && !adaptive()) continue;
    const auto record = static_cast<uint32_t>(records[i]);
    const float* weight = table.weight(record);
    float* target = out + i * dim;
    if (adaptive()) {
      kernels::compensate_adaptive(target, gradients[i], weight, row == nullptr ? weight : row,
                                   row_means(table, record), scalars, dim);
    } else {
      kernels::compensate(target, gradients[i], weight, row, scalars.factor, dim);
    }
    gradients[i] = target;
  }
}

}  // namespace cpudist::server
