// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Arithmetic on packed gradients: merging the pushes of several steps, clipping.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "client/arrivals/queue.h"
#include "client/state.h"
#include "kernels/dedupe.h"
#include "kernels/elementwise.h"

namespace cpudist::client {

namespace {

// The sections of one server's payloads, by block or table.
struct Sections {
  std::map<uint32_t, std::vector<const wire::DenseSection*>> blocks;
  std::map<uint32_t, std::vector<const wire::TableSection*>> tables;
};

struct MergedKeys {
  std::vector<int64_t> unique;
  std::vector<uint32_t> inverse;
  std::vector<const float*> rows;  // per entry, in the order of steps
};

template <typename T>
void merge_block(const std::vector<const wire::DenseSection*>& sections, bool mean, uint8_t* out) {
  auto* target = reinterpret_cast<T*>(out);
  const size_t count = sections.front()->values.size() / sizeof(T);
  std::memcpy(out, sections.front()->values.data(), sections.front()->values.size());
  for (size_t i = 1; i < sections.size(); ++i) {
    kernels::add(target, reinterpret_cast<const T*>(sections[i]->values.data()), count);
  }
  if (mean) {
    kernels::scale_into(target, target, static_cast<T>(1.0 / static_cast<double>(sections.size())),
                        count);
  }
}

MergedKeys merge_keys(const std::vector<const wire::TableSection*>& sections, uint32_t dim) {
  std::vector<int64_t> keys;
  MergedKeys merged;
  for (const wire::TableSection* section : sections) {
    keys.insert(keys.end(), section->keys.begin(), section->keys.end());
    for (size_t i = 0; i < section->keys.size(); ++i) {
      merged.rows.push_back(section->rows.data() + i * dim);
    }
  }
  merged.unique.resize(keys.size());
  merged.inverse.resize(keys.size());
  kernels::KeyDeduper deduper;
  merged.unique.resize(
      deduper.run(keys.data(), keys.size(), merged.unique.data(), merged.inverse.data()));
  return merged;
}

void merge_rows(const MergedKeys& keys, uint32_t dim, size_t steps, bool mean, float* out) {
  size_t seen = 0;
  for (size_t i = 0; i < keys.rows.size(); ++i) {
    float* target = out + size_t{keys.inverse[i]} * dim;
    if (keys.inverse[i] == seen) {  // distinct keys are numbered by first appearance
      std::memcpy(target, keys.rows[i], dim * sizeof(float));
      ++seen;
    } else {
      kernels::add(target, keys.rows[i], dim);
    }
  }
  if (mean) {
    kernels::scale_into(out, out, 1.0f / static_cast<float>(steps), keys.unique.size() * dim);
  }
}

wire::PushHeader merge_headers(const std::vector<wire::PushView>& views) {
  wire::PushHeader header = views.front().header;
  header.samples = 0;
  header.steps = 0;
  header.want_dense = false;
  for (const wire::PushView& view : views) {
    header.samples += view.header.samples;
    header.steps += view.header.steps;
    header.want_dense = header.want_dense || view.header.want_dense;
  }
  return header;
}

Buffer merge_server(const SetState& set, const std::vector<wire::PushView>& views,
                    const std::vector<bool>& mean, const wire::Pool& pool) {
  Sections sections;
  for (const wire::PushView& view : views) {
    for (const wire::DenseSection& section : view.blocks) {
      sections.blocks[section.block].push_back(&section);
    }
    for (const wire::TableSection& section : view.tables) {
      sections.tables[section.table].push_back(&section);
    }
  }
  std::vector<wire::BlockRef> blocks;
  for (const auto& [block, parts] : sections.blocks) {
    blocks.push_back({block, set.block_bytes(block)});
  }
  std::vector<wire::TableRef> tables;
  std::vector<MergedKeys> keys;
  for (const auto& [table, parts] : sections.tables) {
    const uint32_t dim = set.layout.tables[table].dim;
    keys.push_back(merge_keys(parts, dim));
    wire::TableRef ref;
    ref.table = table;
    ref.dim = dim;
    ref.row_count = keys.back().unique.size();
    tables.push_back(ref);
  }
  wire::FilledPush filled = wire::layout_push(merge_headers(views), blocks, tables, pool);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto& parts = sections.blocks[blocks[i].block];
    const wire::BlockSpec& spec = set.layout.blocks[blocks[i].block];
    const bool wide = spec.dtype == wire::DType::kFloat64;
    (wide ? merge_block<double> : merge_block<float>)(parts, mean[spec.group], filled.blocks[i]);
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    const uint32_t table = tables[i].table;
    std::copy(keys[i].unique.begin(), keys[i].unique.end(), filled.keys[i]);
    merge_rows(keys[i], tables[i].dim, sections.tables[table].size(),
               mean[set.layout.tables[table].group], filled.rows[i]);
  }
  return std::move(filled.payload);
}

// Values of a payload that this client has packed and not shared yet.
template <typename T>
T* writable(std::span<const T> values) {
  return const_cast<T*>(values.data());
}

struct Values {
  float* narrow = nullptr;
  double* wide = nullptr;
  size_t count = 0;
  size_t tensor = 0;  // dense parameters stand before tables
};

std::vector<Values> values_of(const SetState& set, std::vector<Buffer>& payloads) {
  std::vector<Values> all;
  for (Buffer& payload : payloads) {
    const wire::PushView view = wire::decode_push(payload.bytes(), set.layout);
    for (const wire::DenseSection& section : view.blocks) {
      uint8_t* bytes = writable(section.values);
      const wire::BlockSpec& block = set.layout.blocks[section.block];
      const size_t count = section.values.size() / size_of(block.dtype);
      if (block.dtype == wire::DType::kFloat64) {
        all.push_back({nullptr, reinterpret_cast<double*>(bytes), count, block.parameter});
      } else {
        all.push_back({reinterpret_cast<float*>(bytes), nullptr, count, block.parameter});
      }
    }
    for (const wire::TableSection& section : view.tables) {
      all.push_back({writable(section.rows), nullptr, section.rows.size(),
                     size_t{set.parameter_count} + section.table});
    }
  }
  return all;
}

}  // namespace

std::vector<Buffer> merge_pushes(const SetState& set, const std::vector<QueuedPush>& pushes,
                                 const std::vector<bool>& mean, const wire::Pool& pool) {
  std::vector<Buffer> payloads;
  for (uint32_t s = 0; s < set.server_count; ++s) {
    std::vector<wire::PushView> views;
    for (const QueuedPush& push : pushes) {
      views.push_back(
          wire::decode_push({push.payloads[s].data(), push.payloads[s].size()}, set.layout));
    }
    payloads.push_back(merge_server(set, views, mean, pool));
  }
  return payloads;
}

void clip_push(const SetState& set, std::vector<Buffer>& payloads, double clip_value,
               double clip_norm, bool each) {
  if (clip_value <= 0.0 && clip_norm <= 0.0) return;
  const std::vector<Values> all = values_of(set, payloads);
  std::vector<double> squared_norms(each ? set.tensor_count() : 1);
  for (const Values& values : all) {
    double& squared_norm = squared_norms[each ? values.tensor : 0];
    if (values.wide != nullptr) {
      if (clip_value > 0.0) kernels::clamp(values.wide, -clip_value, clip_value, values.count);
      squared_norm += kernels::squared_norm(values.wide, values.count);
    } else {
      const auto limit = static_cast<float>(clip_value);
      if (clip_value > 0.0) kernels::clamp(values.narrow, -limit, limit, values.count);
      squared_norm += kernels::squared_norm(values.narrow, values.count);
    }
  }
  if (clip_norm <= 0.0) return;
  for (const Values& values : all) {
    // As torch.nn.utils.clip_grad_norm_, in which a norm that is not a number spreads.
    const double ratio = clip_norm / (std::sqrt(squared_norms[each ? values.tensor : 0]) + 1e-6);
    if (ratio > 1.0) continue;
    if (values.wide != nullptr) {
      kernels::scale_into(values.wide, values.wide, ratio, values.count);
    } else {
      kernels::scale_into(values.narrow, values.narrow, static_cast<float>(ratio), values.count);
    }
  }
}

}  // namespace cpudist::client
