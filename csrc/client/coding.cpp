// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/coding.h"

#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "client/param_set.h"
#include "client/session.h"
#include "kernels/elementwise.h"
#include "kernels/quantize.h"
#include "wire/codec/values.h"

namespace cpudist::client {
namespace {

constexpr size_t kRowsAhead = 8;

std::span<const uint8_t> bytes_of(const Buffer& payload) {
  return {payload.data(), payload.size()};
}

wire::Coding coding_of(const ClientSet& set, wire::WireDType values, bool exact) {
  return {values, exact ? wire::WireDType::kFloat32 : set.layout.pull_dtype};
}

// Values of a payload that this process has packed and not shared yet.
template <typename T>
float* floats_of(std::span<const T> values) {
  return reinterpret_cast<float*>(const_cast<T*>(values.data()));
}

}  // namespace

bool is_coded(const ClientSet& set, const Session& session, uint32_t server) {
  return is_lossy(set.layout) || session.over_network(server);
}

bool orders_rows(const ClientSet& set, const Session& session, bool clips_norm) {
  bool ordered = clips_norm;
  for (uint32_t s = 0; s < set.server_count; ++s) ordered = ordered || is_coded(set, session, s);
  return ordered;
}

Outbound code_push(const ClientSet& set, const Session& session, uint32_t server, Buffer plain,
                   wire::WireDType values, const wire::Pool& pool) {
  if (!is_coded(set, session, server)) return {std::move(plain), false};
  return {code_sections(wire::SectionKind::kPush, bytes_of(plain), set.layout,
                        coding_of(set, values, false), pool),
          true};
}

Outbound code_pull_for(const ClientSet& set, const Session& session, uint32_t server, Buffer plain,
                       bool exact, const wire::Pool& pool) {
  if (!is_coded(set, session, server)) return {std::move(plain), false};
  const wire::Coding coding = coding_of(set, wire::WireDType::kFloat32, exact);
  return {code_pull(bytes_of(plain), set.layout, coding, pool), true};
}

Outbound pull_dense_from(const ClientSet& set, const Session& session, uint32_t server,
                         bool exact) {
  const uint64_t step = set.step_of_pull();
  if (!is_coded(set, session, server)) return {wire::encode_pull_dense(step), false};
  return {wire::encode_coded_pull_dense(coding_of(set, wire::WireDType::kFloat32, exact), step),
          true};
}

void decode_reply(const ClientSet& set, Request* request, const wire::Pool& pool) {
  if (!std::exchange(request->reply.header.coded, false)) return;
  const bool changes =
      set.layout.exchanges_deltas && request->header.kind == wire::FrameKind::kPush;
  wire::Decoded decoded = wire::decode_sections(
      changes ? wire::SectionKind::kChanges : wire::SectionKind::kDense,
      bytes_of(request->reply.payload), set.layout, wire::allocate_from(pool));
  request->reply.payload = std::move(decoded.payload);
}

std::vector<std::span<const float>> rows_of_reply(std::span<const wire::TableRef> asked,
                                                  Request* request, const wire::Pool& pool,
                                                  wire::Version* version) {
  wire::Frame& reply = request->reply;
  if (!reply.header.coded) return wire::decode_rows(bytes_of(reply.payload), asked, version);
  const auto plain = wire::plain_rows_in(bytes_of(reply.payload));
  if (!plain.empty()) return wire::decode_rows(plain, asked, version);
  reply.payload =
      wire::decode_coded_rows(bytes_of(reply.payload), asked, wire::allocate_from(pool)).payload;
  reply.header.coded = false;
  return wire::decode_rows(bytes_of(reply.payload), asked, version);
}

Residues::Residues(const wire::ParamSetLayout& layout) : layout_(layout) {
  for (const wire::TableSpec& table : layout.tables) {
    if (table.rows < std::numeric_limits<uint32_t>::max()) continue;
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

void Residues::round_table(const wire::TableSection& section, float* gradients) {
  const wire::TableSpec& spec = layout_.tables[section.table];
  const auto [entry, fresh] = tables_.try_emplace(section.table);
  Rows& rows = entry->second;
  if (fresh) rows.slots = kernels::AlignedBuffer<uint32_t>(static_cast<size_t>(spec.rows));
  const size_t count = section.keys.size();
  std::vector<float*> held(count);
  for (size_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < count) {
      __builtin_prefetch(&rows.slots[static_cast<size_t>(section.keys[i + kRowsAhead])], 1);
    }
    held[i] = find(rows, section.keys[i], spec.dim);
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

void Residues::round(Buffer* push) {
  const wire::PushView view = wire::decode_push(bytes_of(*push), layout_);
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
