// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "inference/row_table.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cpudist::inference {

namespace {

// Lookups that go on side by side, so that their misses of the cache overlap.
constexpr size_t kBlock = 64;
constexpr size_t kLine = 64;
// Rows that are made at once.
constexpr size_t kMadeAtOnce = 256;

void prefetch(const void* address) { __builtin_prefetch(address, 0, 1); }

}  // namespace

// Some lookups of a batch. Those from `pending` on are not answered yet.
struct RowTable::Block {
  size_t n = 0;
  int64_t key[kBlock];
  uint32_t bucket[kBlock];
  const RowFile* file[kBlock];  // of the row; null: there is none
  uint64_t row[kBlock];
  uint32_t pending[kBlock];  // places in the block
  size_t pending_count = 0;

  // Of the search under way, by the order of `pending`.
  const int64_t* at[kBlock];
  const int64_t* first[kBlock];
  uint32_t left[kBlock];
  const Run* run[kBlock];
  bool hit[kBlock];
};

RowTable::RowTable(std::string name, uint64_t rows, uint64_t dim, uint64_t salt,
                   kernels::InitialRows initial, std::vector<Layer> layers, KeyRules rules)
    : name_(std::move(name)),
      rows_(rows),
      dim_(dim),
      salt_(salt),
      initial_(std::move(initial)),
      rules_(rules),
      layers_(std::move(layers)) {
  for (const Layer& layer : layers_) directories_.push_back(directory_of(layer));
}

RowTable::Directory RowTable::directory_of(const Layer& layer) const {
  Directory directory;
  for (const auto& file : layer) {
    if (!file->gone() && file->dim() != dim_) {
      throw Error(ErrorCode::kInvalidArgument, "table '" + name_ + "': a file of rows of " +
                                                   std::to_string(file->dim()) + ", expected " +
                                                   std::to_string(dim_));
    }
    if (file->whole()) {
      if (layer.size() != 1 || file->rows() != rows_ || rules_.open) {
        throw Error(ErrorCode::kInvalidArgument,
                    "table '" + name_ + "': a file of " + std::to_string(file->rows()) +
                        " rows without keys, expected one of " + std::to_string(rows_));
      }
      directory.whole = file.get();
    } else {
      place(file->gone() ? directory.gone : directory.rows, *file);
    }
  }
  return directory;
}

void RowTable::place(std::vector<Run>& runs, const RowFile& file) const {
  runs.resize(kernels::kBucketCount);
  for (uint32_t bucket = file.first_bucket(); bucket < file.last_bucket(); ++bucket) {
    const uint32_t begin = file.begin_of(bucket);
    const uint32_t end = file.begin_of(bucket + 1);
    if (begin == end) continue;
    if (runs[bucket].file != nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  "table '" + name_ + "': two files have bucket " + std::to_string(bucket));
    }
    runs[bucket] = {&file, begin, end};
  }
}

// Looks for the pending keys in runs: `hit`, and where: `at`, from `first` of its run on.
void RowTable::search(const std::vector<Run>& runs, Block& block) {
  for (size_t i = 0; i < block.pending_count; ++i) {
    const Run& run = runs[block.bucket[block.pending[i]]];
    block.run[i] = &run;
    block.left[i] = run.end - run.begin;
    if (block.left[i] == 0) continue;
    block.first[i] = block.at[i] = run.file->keys(run.begin, run.end);
    prefetch(block.at[i] + block.left[i] / 2);
  }
  // A step of every search, then the next step of every one: what it needs has come meanwhile.
  for (bool more = true; more;) {
    more = false;
    for (size_t i = 0; i < block.pending_count; ++i) {
      const uint32_t left = block.left[i];
      if (left <= 1) continue;
      const uint32_t half = left / 2;
      const int64_t* at = block.at[i];
      at += at[half - 1] < block.key[block.pending[i]] ? half : 0;
      block.at[i] = at;
      block.left[i] = left - half;
      prefetch(at + (left - half) / 2);
      more = true;
    }
  }
  for (size_t i = 0; i < block.pending_count; ++i) {
    block.hit[i] = block.left[i] != 0 && *block.at[i] == block.key[block.pending[i]];
  }
}

// Which file has which key of the block.
void RowTable::find(Block& block) const {
  block.pending_count = block.n;
  for (size_t i = 0; i < block.n; ++i) block.pending[i] = static_cast<uint32_t>(i);
  for (const Directory& directory : directories_) {
    if (block.pending_count == 0) return;
    if (directory.whole != nullptr) {
      for (size_t i = 0; i < block.pending_count; ++i) {
        const uint32_t place = block.pending[i];
        block.file[place] = directory.whole;
        block.row[place] = static_cast<uint64_t>(block.key[place]);
      }
      block.pending_count = 0;
      return;
    }
    for (const auto* runs : {&directory.rows, &directory.gone}) {
      if (runs->empty()) continue;
      search(*runs, block);
      size_t kept = 0;
      for (size_t i = 0; i < block.pending_count; ++i) {
        const uint32_t place = block.pending[i];
        if (!block.hit[i]) {
          block.pending[kept++] = place;
        } else if (runs == &directory.rows) {
          const Run& run = *block.run[i];
          block.file[place] = run.file;
          block.row[place] = run.begin + static_cast<uint64_t>(block.at[i] - block.first[i]);
        }
      }
      block.pending_count = kept;
    }
  }
}

void RowTable::gather(Block& block, float* out) const {
  const std::byte* rows[kBlock];
  for (size_t i = 0; i < block.n; ++i) {
    if (block.file[i] == nullptr) continue;
    rows[i] = block.file[i]->row(block.row[i]);
    const size_t bytes = dim_ * element_bytes(block.file[i]->dtype());
    for (size_t at = 0; at < std::min<size_t>(bytes, 8 * kLine); at += kLine) {
      prefetch(rows[i] + at);
    }
  }
  for (size_t i = 0; i < block.n; ++i) {
    if (block.file[i] != nullptr) block.file[i]->widen(block.row[i], rows[i], out + i * dim_);
  }
}

template <typename Id>
uint64_t RowTable::lookup(const Id* ids, size_t n, float* out) const {
  std::vector<int64_t> missing;
  std::vector<size_t> places;
  Block block;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    block.n = std::min(kBlock, n - begin);
    for (size_t i = 0; i < block.n; ++i) {
      const int64_t key = ids[begin + i];
      if (!rules_.open && static_cast<uint64_t>(key) >= rows_) {
        throw Error(ErrorCode::kRowOutOfRange, "table '" + name_ + "': id " + std::to_string(key) +
                                                   " is outside its " + std::to_string(rows_) +
                                                   " rows; ids must be in [0, " +
                                                   std::to_string(rows_) + ")");
      }
      block.key[i] = key;
      block.bucket[i] = kernels::bucket_of(key, salt_);
      block.file[i] = nullptr;
    }
    find(block);
    gather(block, out + begin * dim_);
    for (size_t i = 0; i < block.n; ++i) {
      if (block.file[i] != nullptr) continue;
      missing.push_back(block.key[i]);
      places.push_back(begin + i);
    }
  }
  make_missing(missing, places, out);
  return missing.size();
}

void RowTable::make_missing(const std::vector<int64_t>& keys, const std::vector<size_t>& places,
                            float* out) const {
  if (rules_.unknown_zeros) {
    for (const size_t place : places) std::fill_n(out + place * dim_, dim_, 0.0f);
    return;
  }
  std::vector<float> made(std::min(keys.size(), kMadeAtOnce) * dim_);
  for (size_t begin = 0; begin < keys.size(); begin += kMadeAtOnce) {
    const size_t n = std::min(kMadeAtOnce, keys.size() - begin);
    initial_.fill(std::span(keys).subspan(begin, n), dim_, made.data());
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(out + places[begin + i] * dim_, made.data() + i * dim_, dim_ * sizeof(float));
    }
  }
}

void RowTable::check_all() const {
  for (const Layer& layer : layers_) {
    for (const auto& file : layer) file->check_all();
  }
}

template uint64_t RowTable::lookup(const int64_t*, size_t, float*) const;
template uint64_t RowTable::lookup(const int32_t*, size_t, float*) const;

}  // namespace cpudist::inference
