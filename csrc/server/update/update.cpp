// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Planning, and merging and updating one table shard or one dense block. The order of every sum is
// the rank order of the pushes; a task reads nothing that another task writes.

#include "server/update/update.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <set>

#include "kernels/elementwise.h"
#include "kernels/optimizers.h"
#include "server/update/correction.h"

namespace cpudist::server {
namespace {

// What a merged gradient begins with (`first`) and how a later push joins it.
template <typename T>
void combine(T* target, const T* values, size_t count, bool first, bool equal, double weight) {
  if (!equal && weight == 0.0) {
    // Not multiplied by zero: the gradient of an empty batch may be NaN.
    if (first) std::memset(target, 0, count * sizeof(T));
  } else if (equal) {
    if (first) {
      std::memcpy(target, values, count * sizeof(T));
    } else {
      kernels::add(target, values, count);
    }
  } else if (first) {
    kernels::scale_into(target, values, static_cast<T>(weight), count);
  } else {
    kernels::accumulate(target, values, static_cast<T>(weight), count);
  }
}

template <typename T>
double finish_merge(T* values, size_t count, double factor, double clip_value, bool norm) {
  if (factor != 1.0) kernels::scale_into(values, values, static_cast<T>(factor), count);
  if (clip_value > 0.0) {
    kernels::clamp(values, static_cast<T>(-clip_value), static_cast<T>(clip_value), count);
  }
  return norm ? kernels::squared_norm(values, count) : 0.0;
}

// Sections are in increasing order of their ids.
const SectionRows* find_rows(const Push& push, uint32_t table, const wire::TableSection** section) {
  const auto& tables = push.view.tables;
  const auto found = std::lower_bound(
      tables.begin(), tables.end(), table,
      [](const wire::TableSection& candidate, uint32_t id) { return candidate.table < id; });
  if (found == tables.end() || found->table != table) return nullptr;
  *section = &*found;
  return &push.sections[static_cast<size_t>(found - tables.begin())];
}

const wire::DenseSection* find_block(const Push& push, uint32_t block) {
  const auto& blocks = push.view.blocks;
  const auto found = std::lower_bound(
      blocks.begin(), blocks.end(), block,
      [](const wire::DenseSection& candidate, uint32_t id) { return candidate.block < id; });
  return found == blocks.end() || found->block != block ? nullptr : &*found;
}

// Equal in every push of a round but for the weight.
const wire::PushHeader& settings(const Pushes& pushes) {
  return pushes.begin()->second.view.header;
}

bool wants_norm(const Pushes& pushes) { return settings(pushes).clip_norm > 0.0; }

constexpr size_t kPrefetchRows = 8;

}  // namespace

bool GradientUpdate::is_void(const Pushes& pushes) {
  return std::all_of(pushes.begin(), pushes.end(),
                     [](const auto& entry) { return entry.second.view.header.weight == 0.0; });
}

void GradientUpdate::plan(const Pushes& pushes) {
  const wire::PushHeader& settings = pushes.begin()->second.view.header;
  clip_value_ = settings.clip_value;
  direct_ = pushes.size() == 1 && settings.clip_value == 0.0 && settings.clip_norm == 0.0;
  averaging_ = Averaging{};
  std::set<uint32_t> blocks;
  std::set<uint32_t> tables;
  double total = 0;
  for (const auto& [rank, push] : pushes) {
    const double weight = push.view.header.weight;
    averaging_.weights.push_back(weight);
    averaging_.equal = averaging_.equal && weight == averaging_.weights.front();
    total += weight;
    for (const wire::DenseSection& section : push.view.blocks) blocks.insert(section.block);
    for (const wire::TableSection& section : push.view.tables) tables.insert(section.table);
  }
  averaging_.factor = 1.0 / (averaging_.equal ? static_cast<double>(pushes.size()) : total);
  touched_blocks_.assign(blocks.begin(), blocks.end());
  touched_tables_.assign(tables.begin(), tables.end());
  shards_.resize(store_.tables.size() * table::Table::kShards);
  blocks_.resize(store_.blocks.size());
  tasks_.clear();
  for (const uint32_t block : touched_blocks_) tasks_.push_back({true, block, 0});
  for (const uint32_t table : touched_tables_) {
    for (uint32_t shard = 0; shard < table::Table::kShards; ++shard) {
      tasks_.push_back({false, table, shard});
    }
  }
}

void GradientUpdate::prepare(Pushes& pushes, bool corrects) {
  locate_again(pushes, store_);
  plan(pushes);
  reserve(pushes, corrects);
  new_rows_.plan(pushes, store_);
}

// What grows with the rows of an update, so that nothing of it fails once the first row is made.
void GradientUpdate::reserve(const Pushes& pushes, bool corrects) {
  const bool merges = !direct_ || corrects;
  for (const Task& task : tasks_) {
    if (!task.dense) {
      reserve_shard(task, pushes, corrects);
    } else if (merges) {
      reserve_merged(task.id);
    }
  }
}

void GradientUpdate::reserve_shard(const Task& task, const Pushes& pushes, bool corrects) {
  size_t count = 0;
  for (const auto& [rank, push] : pushes) {
    const wire::TableSection* section = nullptr;
    const SectionRows* rows = find_rows(push, task.id, &section);
    if (rows != nullptr) count += rows->offsets[task.shard + 1] - rows->offsets[task.shard];
  }
  ShardWork& work = shard_work(task);
  work.records.reserve(count);
  work.deduper.reserve(count);
  if (work.sources.size() < count) {  // the last to grow
    work.distinct.resize(count);
    work.inverse.resize(count);
    work.weights.resize(count);
    work.states.resize(count);
    work.sources.resize(count);
  }
  if (direct_ && !corrects) return;
  // Of rows that several pushes share there is one gradient: what is too much here is never
  // written to, and so takes no memory of the machine.
  work.gradients.reserve(count * store_.tables[task.id]->dim());
}

void GradientUpdate::apply(Pushes& pushes, uint64_t round, Correction* correction) {
  new_rows_.make(pushes, store_, pool_);
  correction_ = correction;
  for (const uint32_t table : touched_tables_) store_.tables[table]->count_step();
  const auto task = [&](size_t i) {
    merge_task(tasks_[i], pushes);
    update_task(tasks_[i], pushes, round);
  };
  pool_.run(tasks_.size(), std::ref(task));
}

size_t GradientUpdate::norm_of(const Task& task, std::span<const double> norms) const {
  if (norms.size() == 1) return 0;
  if (task.dense) return store_.blocks[task.id]->spec().parameter;
  return norms.size() - store_.tables.size() + task.id;
}

void GradientUpdate::merge(Pushes& pushes, std::span<double> squared_norms) noexcept {
  new_rows_.make(pushes, store_, pool_);
  const auto merge_one = [&](size_t i) { merge_task(tasks_[i], pushes); };
  pool_.run(tasks_.size(), std::ref(merge_one));
  for (const Task& task : tasks_) {
    squared_norms[norm_of(task, squared_norms)] +=
        task.dense ? blocks_[task.id].squared_norm : shard_work(task).squared_norm;
  }
}

void GradientUpdate::apply_merged(const Pushes& pushes, std::span<const double> norms,
                                  uint64_t round) {
  const double limit = settings(pushes).clip_norm;
  for (const uint32_t table : touched_tables_) store_.tables[table]->count_step();
  const auto update_one = [&](size_t i) {
    // As torch.nn.utils.clip_grad_norm_, in which a norm that is not a number spreads.
    const double ratio = limit / (norms[norm_of(tasks_[i], norms)] + 1e-6);
    if (!(ratio >= 1.0)) scale_task(tasks_[i], ratio);
    update_task(tasks_[i], pushes, round);
  };
  pool_.run(tasks_.size(), std::ref(update_one));
}

// ---- the tasks: one table shard or one dense block ----

void GradientUpdate::merge_task(const Task& task, const Pushes& pushes) {
  if (!task.dense) {
    merge_shard(task, pushes);
  } else if (store_.blocks[task.id]->spec().dtype == wire::DType::kFloat64) {
    merge_block<double>(task, pushes);
  } else {
    merge_block<float>(task, pushes);
  }
}

template <typename T>
void GradientUpdate::merge_block(const Task& task, const Pushes& pushes) {
  BlockWork& work = blocks_[task.id];
  if (direct_) {
    work.gradient = find_block(pushes.begin()->second, task.id)->values.data();
    return;
  }
  const size_t count = store_.blocks[task.id]->spec().elements;
  reserve_merged(task.id);
  T* merged = reinterpret_cast<T*>(work.merged.data());
  bool first = true;
  size_t position = 0;
  for (const auto& [rank, push] : pushes) {
    const double weight = averaging_.weights[position++];
    const wire::DenseSection* section = find_block(push, task.id);
    if (section == nullptr) continue;
    const T* values = reinterpret_cast<const T*>(section->values.data());
    combine(merged, values, count, first, averaging_.equal, weight);
    first = false;
  }
  work.squared_norm =
      finish_merge(merged, count, averaging_.factor, clip_value_, wants_norm(pushes));
  work.gradient = merged;
}

void GradientUpdate::reserve_merged(uint32_t block) {
  const wire::BlockSpec& spec = store_.blocks[block]->spec();
  const size_t size_bytes = spec.elements * size_of(spec.dtype);
  kernels::AlignedBuffer<uint8_t>& merged = blocks_[block].merged;
  if (merged.size() != size_bytes) merged = kernels::AlignedBuffer<uint8_t>(size_bytes);
}

void GradientUpdate::merge_shard(const Task& task, const Pushes& pushes) {
  ShardWork& work = shard_work(task);
  collect_shard(work, task, pushes);
  work.direct = direct_ && work.rows == work.records.size();
  if (work.direct) return;
  const size_t count = work.rows * store_.tables[task.id]->dim();
  if (work.gradients.size() < count) work.gradients.resize(count);
  add_rows(work, task, pushes);
  work.squared_norm = finish_merge(work.gradients.data(), count, averaging_.factor, clip_value_,
                                   wants_norm(pushes));
}

void GradientUpdate::collect_shard(ShardWork& work, const Task& task, const Pushes& pushes) {
  work.records.clear();
  for (const auto& [rank, push] : pushes) {
    const wire::TableSection* section = nullptr;
    const SectionRows* rows = find_rows(push, task.id, &section);
    if (rows == nullptr) continue;
    work.records.insert(work.records.end(), rows->records.begin() + rows->offsets[task.shard],
                        rows->records.begin() + rows->offsets[task.shard + 1]);
  }
  store_.tables[task.id]->count_pushed(task.shard, work.records.size());
  work.rows = work.deduper.run(work.records.data(), work.records.size(), work.distinct.data(),
                               work.inverse.data());
}

void GradientUpdate::add_rows(ShardWork& work, const Task& task, const Pushes& pushes) {
  const size_t dim = store_.tables[task.id]->dim();
  size_t entry = 0;
  size_t begun = 0;  // merged rows are numbered by first appearance
  size_t position = 0;
  for (const auto& [rank, push] : pushes) {
    const double weight = averaging_.weights[position++];
    const wire::TableSection* section = nullptr;
    const SectionRows* rows = find_rows(push, task.id, &section);
    if (rows == nullptr) continue;
    for (uint32_t at = rows->offsets[task.shard]; at < rows->offsets[task.shard + 1]; ++at) {
      const size_t row = work.inverse[entry++];
      const bool first = row == begun;
      if (first) ++begun;
      combine(work.gradients.data() + row * dim,
              section->rows.data() + size_t{rows->order[at]} * dim, dim, first, averaging_.equal,
              weight);
    }
  }
}

void GradientUpdate::scale_task(const Task& task, double scale) {
  if (!task.dense) {
    ShardWork& work = shard_work(task);
    const size_t count = work.rows * store_.tables[task.id]->dim();
    finish_merge(work.gradients.data(), count, scale, 0.0, false);
    return;
  }
  kernels::AlignedBuffer<uint8_t>& merged = blocks_[task.id].merged;
  const wire::BlockSpec& spec = store_.blocks[task.id]->spec();
  if (spec.dtype == wire::DType::kFloat64) {
    finish_merge(reinterpret_cast<double*>(merged.data()), spec.elements, scale, 0.0, false);
  } else {
    finish_merge(reinterpret_cast<float*>(merged.data()), spec.elements, scale, 0.0, false);
  }
}

void GradientUpdate::update_task(const Task& task, const Pushes& pushes, uint64_t round) {
  if (!task.dense) {
    update_shard(task, pushes, round);
    return;
  }
  table::DenseBlock& block = *store_.blocks[task.id];
  BlockWork& work = blocks_[task.id];
  if (correction_ != nullptr) {
    reserve_merged(task.id);
    work.gradient = correction_->correct(block, work.gradient, work.merged.data());
  }
  block.update(settings(pushes).configs[block.spec().group], work.gradient, round);
}

void GradientUpdate::update_shard(const Task& task, const Pushes& pushes, uint64_t round) {
  ShardWork& work = shard_work(task);
  if (work.rows == 0) return;
  table::Table& table = *store_.tables[task.id];
  const size_t dim = table.dim();
  const auto& config = settings(pushes).configs[table.spec().group];
  touch_rows(work, table, task.shard, round);
  point_at_gradients(work, task, pushes);
  if (correction_ != nullptr) {
    if (work.gradients.size() < work.rows * dim) work.gradients.resize(work.rows * dim);
    correction_->correct(table, {work.distinct.data(), work.rows}, work.sources.data(),
                         work.gradients.data());
  }
  step_rows(work, table, config);
  if (table.averaged()) follow_averages(work, table, round);
}

void GradientUpdate::follow_averages(const ShardWork& work, const table::Table& table,
                                     uint64_t round) {
  for (size_t i = 0; i < work.rows; ++i) {
    table.follow_average(static_cast<uint32_t>(work.distinct[i]), round);
  }
}

void GradientUpdate::step_rows(const ShardWork& work, const table::Table& table,
                               const kernels::OptimizerConfig& config) {
  const size_t dim = table.dim();
  if (kernels::counts_per_row(config) && kernels::step_dependent(config)) {
    kernels::StepCache<float> steps(config);
    for (size_t i = 0; i < work.rows; ++i) {
      const table::RowHeader& header = table.header(static_cast<uint32_t>(work.distinct[i]));
      kernels::update(steps.at(header.count), work.weights[i], work.states[i], work.sources[i], dim,
                      dim);
    }
    return;
  }
  const auto step = static_cast<int64_t>(table.step());
  kernels::update_rows(kernels::make_step<float>(config, step), work.weights.data(),
                       work.states.data(), work.sources.data(), work.rows, dim);
}

void GradientUpdate::touch_rows(ShardWork& work, table::Table& table, uint32_t shard,
                                uint64_t round) {
  for (size_t i = 0; i < work.rows; ++i) {
    if (i + kPrefetchRows < work.rows) {
      table.prefetch_record(static_cast<uint32_t>(work.distinct[i + kPrefetchRows]));
    }
    const auto record = static_cast<uint32_t>(work.distinct[i]);
    table.before_change(record, shard);
    table::RowHeader& header = table.header(record);
    if (table.averaged()) table.settle_average(record, round);
    header.count_update();
    header.last_seen = static_cast<uint32_t>(round);
    work.weights[i] = table.weight(record);
    work.states[i] = table.state(record);
  }
}

void GradientUpdate::point_at_gradients(ShardWork& work, const Task& task,
                                        const Pushes& pushes) const {
  const size_t dim = store_.tables[task.id]->dim();
  if (!work.direct) {
    for (size_t i = 0; i < work.rows; ++i) work.sources[i] = work.gradients.data() + i * dim;
    return;
  }
  const wire::TableSection* section = nullptr;
  const SectionRows* rows = find_rows(pushes.begin()->second, task.id, &section);
  const uint32_t* order = rows->order.data() + rows->offsets[task.shard];
  for (size_t i = 0; i < work.rows; ++i) {
    work.sources[i] = section->rows.data() + size_t{order[i]} * dim;
  }
}

}  // namespace cpudist::server
