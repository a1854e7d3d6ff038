// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/values/transfer.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gather_scatter.h"
#include "kernels/hash.h"

namespace cpudist::client {

namespace {

uint64_t rows_per_chunk(const wire::TableSpec& spec, uint32_t state_elements) {
  const uint64_t row_bytes =
      (spec.dim + state_elements) * sizeof(float) + sizeof(int64_t) + sizeof(uint32_t);
  return std::max<uint64_t>(kChunkBytes / row_bytes, 1);
}

// The positions of one server's rows that travel in one chunk.
std::span<const uint32_t> chunk_of(const KeySplit& split, uint32_t server, uint64_t begin,
                                   uint64_t size) {
  const auto positions = split.positions(server);
  if (begin >= positions.size()) return {};
  return positions.subspan(begin, std::min<uint64_t>(size, positions.size() - begin));
}

uint64_t longest_share(const KeySplit& split, uint32_t server_count) {
  uint64_t longest = 0;
  for (uint32_t s = 0; s < server_count; ++s) {
    longest = std::max<uint64_t>(longest, split.count(s));
  }
  return longest;
}

Buffer pack_rows(const RowValues& source, wire::TableRef ref, std::span<const uint32_t> positions,
                 const wire::Pool& pool) {
  ref.row_count = positions.size();
  wire::FilledStore filled = wire::layout_store({}, {&ref, 1}, pool);
  const auto gather = [&](const void* from, size_t row_bytes, void* to) {
    kernels::gather_rows(from, row_bytes, positions.data(), positions.size(), row_bytes, to,
                         row_bytes);
  };
  gather(source.keys.data(), sizeof(int64_t), filled.keys[0]);
  gather(source.weights, ref.dim * sizeof(float), filled.weights[0]);
  if (ref.state_elements > 0) {
    gather(source.state, ref.state_elements * sizeof(float), filled.state[0]);
  }
  if (ref.counts) gather(source.counts, sizeof(uint32_t), filled.counts[0]);
  return std::move(filled.payload);
}

void check_keys(const wire::TableSpec& spec, std::span<const int64_t> keys) {
  if (spec.open) return;
  const size_t bad =
      kernels::find_out_of_range(keys.data(), keys.size(), static_cast<int64_t>(spec.rows));
  if (bad == keys.size()) return;
  throw Error(ErrorCode::kRowOutOfRange, "table '" + spec.name + "': key " +
                                             std::to_string(keys[bad]) + " is outside its " +
                                             std::to_string(spec.rows) + " rows");
}

[[noreturn]] void refuse_reply(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "fetch: a server's answer has " + what);
}

void check_parameter(const SetState& set, uint32_t parameter) {
  if (parameter < set.parameter_count || set.blocks_of(parameter).empty()) return;
  throw Error(ErrorCode::kInvalidArgument,
              "dense parameter " + std::to_string(parameter) + " of parameter set " +
                  std::to_string(set.id) + ", which has " + std::to_string(set.parameter_count));
}

}  // namespace

void store_table(Shared& shared, SetState& set, const RowValues& rows, uint64_t step) {
  const wire::TableSpec& spec = set.table(rows.table).spec();
  check_keys(spec, rows.keys);
  const uint32_t state_elements = rows.state == nullptr ? 0 : set.row_state_elements(rows.table);
  const wire::TableRef ref{rows.table, 0, spec.dim, state_elements, rows.counts != nullptr, step};
  KeySplit split(shared.owners, set.server_count, kernels::table_salt(spec.name));
  split.run(rows.keys);
  const uint64_t chunk = rows_per_chunk(spec, state_elements);
  const uint64_t longest = longest_share(split, set.server_count);
  // The first chunk goes to every server, with rows or without: it carries the step.
  for (uint64_t begin = 0; begin == 0 || begin < longest; begin += chunk) {
    const auto send_chunk = [&] {
      std::vector<RequestPtr> requests;
      for (uint32_t s = 0; s < set.server_count; ++s) {
        const auto positions = chunk_of(split, s, begin, chunk);
        if (begin > 0 && positions.empty()) continue;
        requests.push_back(shared.session.send(s, wire::FrameKind::kStore, set.id,
                                               pack_rows(rows, ref, positions, shared.pool)));
      }
      return requests;
    };
    shared.run(send_chunk, [](std::span<const RequestPtr>) {});
  }
}

void store_parameter(Shared& shared, SetState& set, uint32_t parameter, const void* weights,
                     const void* state, uint64_t step, const void* average) {
  check_parameter(set, parameter);
  std::map<uint32_t, std::vector<wire::BlockRef>> shares;  // by server
  std::map<uint32_t, const uint8_t*> state_of;             // by block
  const auto* state_next = static_cast<const uint8_t*>(state);
  for (const uint32_t b : set.blocks_of(parameter)) {
    const wire::BlockSpec& block = set.layout.blocks[b];
    const uint64_t state_bytes =
        state == nullptr ? 0 : set.block_state_elements(b) * size_of(block.dtype);
    shares[block.shard].push_back({b, set.block_bytes(b), state_bytes, step, average != nullptr});
    state_of[b] = state_next;
    if (state != nullptr) state_next += state_bytes;
  }
  const auto send_blocks = [&] {
    std::vector<RequestPtr> requests;
    for (const auto& [server, refs] : shares) {
      wire::FilledStore filled = wire::layout_store(refs, {}, shared.pool);
      for (size_t i = 0; i < refs.size(); ++i) {
        const wire::BlockSpec& block = set.layout.blocks[refs[i].block];
        const auto copy = [&](uint8_t* to, const void* base) {
          const uint64_t offset = block.offset * size_of(block.dtype);
          std::memcpy(to, static_cast<const uint8_t*>(base) + offset, refs[i].size_bytes);
        };
        copy(filled.block_weights[i], weights);
        if (average != nullptr) copy(filled.block_average[i], average);
        if (refs[i].state_bytes > 0) {
          std::memcpy(filled.block_state[i], state_of[refs[i].block], refs[i].state_bytes);
        }
      }
      requests.push_back(
          shared.session.send(server, wire::FrameKind::kStore, set.id, std::move(filled.payload)));
    }
    return requests;
  };
  shared.run(send_blocks, [](std::span<const RequestPtr>) {});
}

uint64_t fetch_parameter(Shared& shared, SetState& set, uint32_t parameter, void* weights,
                         void* state) {
  check_parameter(set, parameter);
  std::map<uint32_t, uint64_t> state_offset;  // by block, in bytes
  std::map<uint32_t, RequestPtr> requests;    // by server
  uint64_t offset = 0;
  for (const uint32_t b : set.blocks_of(parameter)) {
    const wire::BlockSpec& block = set.layout.blocks[b];
    state_offset[b] = offset;
    offset += set.block_state_elements(b) * size_of(block.dtype);
    if (requests.contains(block.shard)) continue;
    wire::FetchRequest request;
    request.blocks = true;
    request.parameter = parameter;
    requests[block.shard] =
        shared.session.send(block.shard, wire::FrameKind::kFetchState, set.id, encode(request));
  }
  std::vector<RequestPtr> pending;
  for (const auto& [server, request] : requests) pending.push_back(request);
  shared.session.wait(pending);
  uint64_t step = 0;
  size_t seen = 0;
  for (const RequestPtr& request : pending) {
    const wire::StoreView view = wire::decode_store(request->reply.payload.bytes(), set.layout);
    for (const wire::BlockValues& values : view.blocks) {
      const wire::BlockSpec& block = set.layout.blocks[values.block];
      if (block.parameter != parameter) continue;
      ++seen;
      step = std::max(step, values.step);
      if (weights != nullptr) {
        std::memcpy(static_cast<uint8_t*>(weights) + block.offset * size_of(block.dtype),
                    values.weights.data(), values.weights.size());
      }
      const uint64_t expected = set.block_state_elements(values.block) * size_of(block.dtype);
      if (state == nullptr || expected == 0) continue;
      if (values.state.size() != expected) refuse_reply("state of another size");
      std::memcpy(static_cast<uint8_t*>(state) + state_offset[values.block], values.state.data(),
                  expected);
    }
  }
  if (seen != set.blocks_of(parameter).size()) refuse_reply("too few blocks");
  return step;
}

}  // namespace cpudist::client
