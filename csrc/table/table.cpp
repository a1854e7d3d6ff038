// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Lookups run in small batches: all hashes first, then all slots, then all records, so that the
// memory system works on many rows at once.

#include "table/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "base/errors.h"
#include "kernels/gather_scatter.h"

namespace cpudist::table {
namespace {

constexpr size_t kBatch = 64;
constexpr uint64_t kSlabBytes = 4ull << 20;
constexpr uint64_t kMaxRecords = 0x7fffffffu;  // record numbers are also read as int32

uint32_t slab_capacity(const wire::TableSpec& spec, uint32_t server_count, uint64_t stride) {
  const double share = static_cast<double>(spec.rows) / server_count;
  const double likely = share + 4.0 * std::sqrt(share) + 16.0;
  const double whole = static_cast<double>(kSlabBytes / stride);
  return static_cast<uint32_t>(std::max(2.0, std::min(whole, likely)));
}

uint32_t checked_state_elements(const kernels::OptimizerConfig& config, uint32_t dim) {
  const size_t count = kernels::state_elements(config, dim, dim);
  if (count > std::numeric_limits<uint32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, "a row's optimizer state is too large");
  }
  return static_cast<uint32_t>(count);
}

}  // namespace

Table::Table(uint32_t param_set, uint32_t id, wire::TableSpec spec,
             const kernels::OptimizerConfig& config, uint32_t shard_id, uint32_t server_count)
    : id_(id),
      spec_(std::move(spec)),
      config_(config),
      shard_id_(shard_id),
      server_count_(server_count),
      salt_(kernels::table_salt(param_set, id)),
      state_elements_(checked_state_elements(config, spec_.dim)) {
  const uint64_t elements = uint64_t{spec_.dim} + state_elements_;
  stride_ = (sizeof(RowHeader) + elements * sizeof(float) + 15) / 16 * 16;
  records_per_slab_ = slab_capacity(spec_, server_count, stride_);
  slab_reciprocal_ = std::numeric_limits<uint64_t>::max() / records_per_slab_ + 1;
  for (uint32_t bucket = 0; bucket < kernels::kBucketCount; ++bucket) {
    shard_of_bucket_[bucket] = static_cast<uint8_t>(bucket / server_count % kShards);
  }
  shards_.reserve(kShards);
  for (uint32_t i = 0; i < kShards; ++i) shards_.emplace_back(salt_);
}

uint64_t Table::size_bytes() const {
  uint64_t total = slabs_.size() * records_per_slab_ * stride_;
  for (const HashIndex& shard : shards_) total += shard.size_bytes();
  return total;
}

void Table::find(std::span<const int64_t> keys, uint32_t* records, uint8_t* shards) const {
  uint64_t hashes[kBatch];
  uint8_t found_in[kBatch];
  for (size_t begin = 0; begin < keys.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, keys.size() - begin);
    uint8_t* shard = shards != nullptr ? shards + begin : found_in;
    for (size_t i = 0; i < count; ++i) {
      hashes[i] = HashIndex::hash(keys[begin + i], salt_);
      shard[i] = static_cast<uint8_t>(shard_of(hashes[i]));
      shards_[shard[i]].prefetch(hashes[i]);
    }
    for (size_t i = 0; i < count; ++i) {
      const int64_t key = keys[begin + i];
      const uint32_t record = shards_[shard[i]].find(key, hashes[i]);
      if (record == HashIndex::kNone) throw_unknown(key);
      records[begin + i] = record;
    }
  }
}

void Table::gather(std::span<const int64_t> keys, float* out) const {
  uint32_t records[kBatch];
  const void* rows[kBatch];
  const size_t row_bytes = size_t{spec_.dim} * sizeof(float);
  for (size_t begin = 0; begin < keys.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, keys.size() - begin);
    find(keys.subspan(begin, count), records, nullptr);
    for (size_t i = 0; i < count; ++i) {
      const auto* row = reinterpret_cast<const uint8_t*>(weight(records[i]));
      rows[i] = row;
      for (size_t at = 0; at < row_bytes; at += kernels::kCacheLineBytes) {
        __builtin_prefetch(row + at);
      }
    }
    kernels::gather_pointers(rows, count, row_bytes, out + begin * spec_.dim, row_bytes);
  }
}

void Table::fetch(std::span<const int64_t> keys, float* weights, float* state,
                  uint32_t* counts) const {
  uint32_t records[kBatch];
  const size_t width = state_elements_;
  for (size_t begin = 0; begin < keys.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, keys.size() - begin);
    find(keys.subspan(begin, count), records, nullptr);
    for (size_t i = 0; i < count; ++i) prefetch_record(records[i]);
    for (size_t i = 0; i < count; ++i) {
      const size_t row = begin + i;
      std::memcpy(weights + row * spec_.dim, weight(records[i]), spec_.dim * sizeof(float));
      if (width > 0) {
        std::memcpy(state + row * width, this->state(records[i]), width * sizeof(float));
      }
      counts[row] = header(records[i]).count;
    }
  }
}

void Table::check(const wire::TableRows& rows) const {
  const size_t count = rows.keys.size();
  const bool fits = rows.weights.size() == count * spec_.dim &&
                    (rows.state.empty() || rows.state.size() == count * state_elements_) &&
                    (rows.counts.empty() || rows.counts.size() == count);
  if (!fits) {
    throw Error(ErrorCode::kInvalidArgument,
                "table " + spec_.name + ": weights, state or counts do not fit " +
                    std::to_string(count) + " rows of " + std::to_string(spec_.dim) +
                    " elements with " + std::to_string(state_elements_) + " of state");
  }
  for (const int64_t key : rows.keys) {
    if (key < 0 || static_cast<uint64_t>(key) >= spec_.rows) {
      throw Error(ErrorCode::kRowOutOfRange, "table " + spec_.name + ": row " +
                                                 std::to_string(key) + " is not in 0.." +
                                                 std::to_string(spec_.rows) + " (exclusive)");
    }
    const uint32_t owner = wire::owner_of_bucket(kernels::bucket_of(key, salt_), server_count_);
    if (owner != shard_id_) {
      throw Error(ErrorCode::kInvalidArgument,
                  "table " + spec_.name + ": row " + std::to_string(key) + " belongs to server " +
                      std::to_string(owner) + ", not to server " + std::to_string(shard_id_));
    }
  }
  check_room(rows.keys);
}

void Table::check_room(std::span<const int64_t> keys) const {
  if (keys.size() <= kMaxRecords - rows_) return;
  std::set<int64_t> fresh;
  for (const int64_t key : keys) {
    const uint64_t hash = HashIndex::hash(key, salt_);
    if (shards_[shard_of(hash)].find(key, hash) == HashIndex::kNone) fresh.insert(key);
  }
  if (fresh.size() <= kMaxRecords - rows_) return;
  throw Error(ErrorCode::kOverloaded, "table " + spec_.name + ": a server holds at most " +
                                          std::to_string(kMaxRecords) + " rows; use more servers");
}

void Table::store(const wire::TableRows& rows) {
  check(rows);
  const size_t width = state_elements_;
  for (size_t i = 0; i < rows.keys.size(); ++i) {
    const uint32_t record = find_or_create(rows.keys[i]);
    std::memcpy(weight(record), rows.weights.data() + i * spec_.dim, spec_.dim * sizeof(float));
    if (!rows.state.empty()) {
      std::memcpy(state(record), rows.state.data() + i * width, width * sizeof(float));
    } else if (width > 0) {
      kernels::init_state(config_, state(record), spec_.dim, spec_.dim);
    }
    header(record).count = rows.counts.empty() ? 0 : rows.counts[i];
  }
  step_ = rows.step;
}

uint32_t Table::find_or_create(int64_t key) {
  const uint64_t hash = HashIndex::hash(key, salt_);
  HashIndex& index = shards_[shard_of(hash)];
  const uint32_t found = index.find(key, hash);
  if (found != HashIndex::kNone) return found;
  if (rows_ == slabs_.size() * records_per_slab_) {
    slabs_.emplace_back(kernels::checked_size_bytes(records_per_slab_, stride_));
    slab_starts_.push_back(slabs_.back().data());
  }
  const auto record = static_cast<uint32_t>(rows_);
  header(record) = RowHeader{key, 0, 0};
  if (state_elements_ > 0) kernels::init_state(config_, state(record), spec_.dim, spec_.dim);
  index.insert(key, hash, record);
  ++rows_;
  return record;
}

void Table::throw_unknown(int64_t key) const {
  throw Error(ErrorCode::kInvalidArgument,
              "table " + spec_.name + ": row " + std::to_string(key) +
                  " was never stored on server " + std::to_string(shard_id_) + " (the table has " +
                  std::to_string(spec_.rows) + " rows, this server " + std::to_string(rows_) + ")");
}

}  // namespace cpudist::table
