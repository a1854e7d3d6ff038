// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The arithmetic of one update: its pushes merged in rank order, averaged, clipped and applied. Who
// pushes, and when it is applied, is the policy's.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/aligned.h"
#include "kernels/dedupe.h"
#include "server/update/new_rows.h"
#include "server/update/pool.h"
#include "server/update/push.h"
#include "table/store.h"

namespace cpudist::server {

class Correction;

// Thread safety: one caller at a time, who also has the store to itself. Scratch memory is reused
// between updates.
class GradientUpdate {
 public:
  // `memory` is that of new rows; none: there is no cap.
  GradientUpdate(table::ParamStore& store, UpdatePool& pool, RowMemory memory = {})
      : store_(store), pool_(pool), new_rows_(std::move(memory)) {}

  // Every trainer has weight 0: nothing may be applied.
  static bool is_void(const Pushes& pushes);

  // Before the others: looks rows up again that have been freed since, and finds the memory for the
  // update, that of new rows included. `corrects`: the update will be given a correction. Throws
  // std::bad_alloc, or Error as NewRows::plan; nothing has changed then.
  void prepare(Pushes& pushes, bool corrects = false);
  // Makes new rows, merges, averages, clips by value, corrects if asked to, and updates, each row
  // and element in one task. Needs no memory for that.
  void apply(Pushes& pushes, uint64_t round, Correction* correction = nullptr);
  // First phase of a round with clip_norm: makes new rows, merges, averages and clips by value
  // only. Adds to `squared_norms`, one or one of each tensor, those of what was merged, summed in
  // double: blocks by id, then tables by id and shard.
  void merge(Pushes& pushes, std::span<double> squared_norms) noexcept;
  // Second phase: updates with the merged gradient times min(1, clip_norm / (norm + 1e-6)), each
  // tensor by its own norm, or all by the only one.
  void apply_merged(const Pushes& pushes, std::span<const double> norms, uint64_t round);

  // Ids of the blocks with a gradient in the round last merged or applied, increasing.
  const std::vector<uint32_t>& touched_blocks() const { return touched_blocks_; }

 private:
  struct ShardWork {                // rows of one table shard
    std::vector<int32_t> records;   // of every row of every pusher, in rank order
    std::vector<uint32_t> inverse;  // entry -> merged row
    std::vector<int64_t> distinct;  // merged row -> record
    std::vector<float> gradients;   // merged rows
    std::vector<float*> weights;
    std::vector<float*> states;
    std::vector<const float*> sources;  // where the gradient of each merged row lies
    size_t rows = 0;
    bool direct = false;  // the gradients lie in the only push, in the order of its section
    double squared_norm = 0;
    kernels::KeyDeduper deduper;
  };
  struct BlockWork {
    kernels::AlignedBuffer<uint8_t> merged;
    const void* gradient = nullptr;  // merged, or a push's own values
    double squared_norm = 0;
  };
  struct Task {
    bool dense;
    uint32_t id;  // block or table
    uint32_t shard;
  };
  struct Averaging {
    bool equal = true;
    double factor = 1.0;          // 1/n or 1/sum of weights
    std::vector<double> weights;  // in rank order
  };

  // Where of `norms` that of a task's tensor is: dense parameters stand before tables.
  size_t norm_of(const Task& task, std::span<const double> norms) const;
  void plan(const Pushes& pushes);
  void reserve(const Pushes& pushes, bool corrects);
  void reserve_shard(const Task& task, const Pushes& pushes, bool corrects);
  void merge_task(const Task& task, const Pushes& pushes);
  void merge_shard(const Task& task, const Pushes& pushes);
  void collect_shard(ShardWork& work, const Task& task, const Pushes& pushes);
  void add_rows(ShardWork& work, const Task& task, const Pushes& pushes);
  template <typename T>
  void merge_block(const Task& task, const Pushes& pushes);
  void update_task(const Task& task, const Pushes& pushes, uint64_t round);
  void update_shard(const Task& task, const Pushes& pushes, uint64_t round);
  static void touch_rows(ShardWork& work, table::Table& table, uint32_t shard, uint64_t round);
  static void follow_averages(const ShardWork& work, const table::Table& table, uint64_t round);
  static void step_rows(const ShardWork& work, const table::Table& table,
                        const kernels::OptimizerConfig& config);
  void point_at_gradients(ShardWork& work, const Task& task, const Pushes& pushes) const;
  void scale_task(const Task& task, double scale);
  void reserve_merged(uint32_t block);
  ShardWork& shard_work(const Task& task) {
    return shards_[size_t{task.id} * table::Table::kShards + task.shard];
  }

  table::ParamStore& store_;
  UpdatePool& pool_;
  Averaging averaging_;
  bool direct_ = false;  // one push, nothing to clip: its gradients are used where they lie
  double clip_value_ = 0;
  Correction* correction_ = nullptr;  // of the push that is being applied
  std::vector<Task> tasks_;
  std::vector<uint32_t> touched_blocks_;
  std::vector<uint32_t> touched_tables_;
  std::vector<ShardWork> shards_;
  std::vector<BlockWork> blocks_;
  NewRows new_rows_;
};

}  // namespace cpudist::server
