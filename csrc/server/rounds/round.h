// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One round's arithmetic: the pushes of the members merged in rank order, averaged, clipped and
// applied. Who is a member and when a round is complete stands in param_set.h.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/aligned.h"
#include "kernels/dedupe.h"
#include "server/delay_compensator.h"
#include "server/outbox.h"
#include "server/update_pool.h"
#include "table/store.h"
#include "wire/codec/codec.h"
#include "wire/messages.h"

namespace cpudist::server {

// Positions of a section's rows grouped by table shard, in batch order within a shard, and their
// records. Found when the push arrives, so that the last arriver need not look up everybody's rows.
struct SectionRows {
  std::vector<uint32_t> order;
  std::vector<int32_t> records;  // of position order[i]
  std::array<uint32_t, table::Table::kShards + 1> offsets{};
};

struct RoundPush {
  Ticket ticket;
  Buffer payload;  // what `view` points into; plain
  // How it came, and is to be answered, if it came coded.
  std::optional<wire::Coding> coding;
  wire::PushView view;
  std::vector<SectionRows> sections;        // beside view.tables
  std::vector<std::vector<uint32_t>> held;  // records, beside view.holds.tables
};

using RoundPushes = std::map<uint32_t, RoundPush>;  // by rank

// Looks up the rows of every table section. Throws kInvalidArgument for rows never stored.
std::vector<SectionRows> locate_rows(const wire::PushView& view, const table::ParamStore& store);

// The records of the rows that the sender holds. Throws as above.
std::vector<std::vector<uint32_t>> locate_held(const wire::PushView& view,
                                               const table::ParamStore& store);

// The first difference in hyper-parameters or clip settings between two pushes of a round, naming
// the field, both values and both ranks.
std::optional<std::string> find_mismatch(const RoundPushes& pushes);
// The shortest text that reads back as the same number.
std::string show(double value);
// As above for two configurations; empty when equal. "lr: 0.1 against 0.2".
std::string describe_difference(const kernels::OptimizerConfig& first,
                                const kernels::OptimizerConfig& second);

// Thread safety: one caller at a time, who also has the store to itself. Scratch memory is reused
// between rounds.
class RoundUpdate {
 public:
  RoundUpdate(table::ParamStore& store, UpdatePool& pool) : store_(store), pool_(pool) {}

  // Every trainer has weight 0: nothing may be applied.
  static bool is_void(const RoundPushes& pushes);

  // Merges, averages, clips by value, compensates for delay if asked to, and updates, each row and
  // element in one task.
  void apply(const RoundPushes& pushes, uint64_t round, DelayCompensator* compensator = nullptr);
  // First phase of a round with clip_norm: merges, averages and clips by value only. Returns the
  // squared norm of what was merged, summed in double: blocks by id, then tables by id and shard.
  double merge(const RoundPushes& pushes);
  // Second phase: updates with the merged gradient times min(1, clip_norm / (total_norm + 1e-6)).
  void apply_merged(const RoundPushes& pushes, double total_norm, uint64_t round);

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

  void plan(const RoundPushes& pushes);
  void merge_task(const Task& task, const RoundPushes& pushes);
  void merge_shard(const Task& task, const RoundPushes& pushes);
  void collect_shard(ShardWork& work, const Task& task, const RoundPushes& pushes);
  void add_rows(ShardWork& work, const Task& task, const RoundPushes& pushes);
  template <typename T>
  void merge_block(const Task& task, const RoundPushes& pushes);
  void update_task(const Task& task, const RoundPushes& pushes, uint64_t round);
  void update_shard(const Task& task, const RoundPushes& pushes, uint64_t round);
  static void touch_rows(ShardWork& work, table::Table& table, uint64_t round);
  void point_at_gradients(ShardWork& work, const Task& task, const RoundPushes& pushes) const;
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
  DelayCompensator* compensator_ = nullptr;  // of the push that is being applied
  std::vector<Task> tasks_;
  std::vector<uint32_t> touched_blocks_;
  std::vector<uint32_t> touched_tables_;
  std::vector<ShardWork> shards_;
  std::vector<BlockWork> blocks_;
};

}  // namespace cpudist::server
