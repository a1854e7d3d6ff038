// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// DC-ASGD (Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML
// 2017, algorithms 1 and 2) on one server: what every trainer has read and not yet pushed a
// gradient of, and the gradient that makes up for what has moved since.
//
// A backup belongs to one gradient of one trainer. Rows are kept under the step that their pull
// named, dense values under the version that they were sent with; a push names both. What a push
// has used, and what is older, goes when it has been applied.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "kernels/aligned.h"
#include "server/update/correction.h"
#include "table/row_index.h"
#include "table/store.h"
#include "wire/messages.h"

namespace cpudist::server {

// Thread safety: `note_*` and size_bytes() from any number of threads; of what changes or reads the
// push that is being applied, or forgets, nothing meanwhile. `correct` from any number of threads
// for different blocks, or different rows, between begin() and end().
class DelayCompensator final : public Correction {
 public:
  DelayCompensator(const wire::ParamSetLayout& layout);

  // ---- what trainers read ----
  // `rows` are to be sent for gradient `step`, or with kPrefetchBit for a prefetch; 0 is none. Rows
  // read again for it replace the first ones. A request that comes a second time gets what it got
  // at first: nobody knows which of two answers the trainer takes.
  void note_rows(uint32_t rank, uint64_t step, uint64_t request, const wire::PullTable& pull,
                 float* rows);
  // `reply` holds every block as after `version` updates; it is kept, not copied. A pull replaces
  // an earlier one for the same gradient, but not the same request that came before.
  void note_dense_pull(uint32_t rank, uint64_t step, uint64_t request, uint64_t version,
                       const Buffer& reply);
  void note_dense_reply(uint32_t rank, uint64_t version, const Buffer& reply);
  void forget(uint32_t rank);  // it takes no part any more
  void forget_all();           // values were stored: nothing tells how far gradients have moved
  // These have lost their records: what they begin with again is not what gradients have moved.
  void forget_rows(const table::Table& table, std::span<const table::Freed> rows) noexcept;
  uint64_t size_bytes() const;

  // ---- the push that is being applied ----
  // Throws std::bad_alloc; then nothing has begun.
  void begin(uint32_t rank, const wire::PushView& push, const table::ParamStore& store);
  const void* correct(const table::DenseBlock& block, const void* gradient, void* out) override;
  void correct(const table::Table& table, std::span<const int64_t> records, const float** gradients,
               float* out) override;
  void end();

 private:
  struct TableRead {
    table::RowIndex index{0};  // key -> position
    std::vector<int64_t> keys;
    std::vector<float> rows;
    std::set<uint64_t> requests;  // that have read them

    uint32_t find(int64_t key, uint64_t hash) const {
      return index.find(hash, [&](uint32_t position) { return keys[position] == key; });
    }
  };
  struct DenseRead {
    uint64_t version;
    uint64_t pulled_for;  // 0: the reply to a push
    uint64_t request;
    Buffer reply;
  };
  struct Reads {  // of one trainer
    mutable std::mutex mutex;
    uint64_t applied = 0;                     // its last gradient
    uint64_t kept_from = wire::kPrefetchBit;  // its first prefetch that may still be used
    std::map<uint64_t, std::map<uint32_t, TableRead>> rows;  // by step or prefetch, and table
    std::deque<DenseRead> dense;                             // by version
  };
  Reads& reads_of(uint32_t rank);
  void note_dense(uint32_t rank, DenseRead read);
  void find_dense(const Reads& reads, uint64_t version);
  void make_room(const table::ParamStore& store);
  float* row_means(const table::Table& table, uint32_t record);
  template <typename T>
  const T* compensate_block(const table::DenseBlock& block, const T* gradient, T* out);
  bool adaptive() const { return settings_.kind == wire::Compensation::kAdaptive; }

  const wire::ParamSetLayout& layout_;
  const wire::DelayCompensation settings_;
  mutable std::mutex mutex_;  // the map, not what it points to
  std::map<uint32_t, std::unique_ptr<Reads>> reads_;
  // kAdaptive: the running means of g * g, by block, and by table and record: a part for each of
  // the table's slabs, so that nothing is copied when it grows.
  std::vector<kernels::AlignedBuffer<uint8_t>> block_means_;
  std::vector<std::vector<kernels::AlignedBuffer<float>>> row_means_;

  Reads* current_ = nullptr;
  uint64_t step_ = 0;
  uint64_t version_ = 0;
  uint64_t kept_from_ = 0;
  // What the gradient was computed on, by table: pulled for its step, then by its prefetches in
  // their order.
  std::vector<std::vector<const TableRead*>> rows_;
  std::vector<const uint8_t*> blocks_;  // by id; null: not known
};

// Null if nothing is to be compensated. `layout` outlives it.
std::unique_ptr<DelayCompensator> make_compensator(const wire::ParamSetLayout& layout);

}  // namespace cpudist::server
