// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/push/coding.h"

#include <utility>

#include "base/errors.h"
#include "client/session.h"
#include "client/state.h"
#include "wire/primitives.h"
#include "wire/sections.h"

namespace cpudist::client {
namespace {

wire::Coding coding_of(const SetState& set, wire::WireDType values, bool exact) {
  return {values, exact ? wire::WireDType::kFloat32 : set.layout.pull_dtype};
}

using Counter = std::atomic<uint64_t> TableCache::*;

// A part of a frame that is of one table, `part` of `whole` before it was coded.
void count_part(const SetState& set, uint32_t table, Counter counter, uint64_t part, uint64_t whole,
                uint64_t frame_bytes) {
  if (whole == 0 || part > whole) return;  // a broken reply, which is refused where it is read
  const double share = static_cast<double>(part) / static_cast<double>(whole);
  (set.tables[table].get()->*counter)
      .fetch_add(static_cast<uint64_t>(share * static_cast<double>(frame_bytes)),
                 std::memory_order_relaxed);
}

// A frame of nothing but keys or rows.
void count_asked(const SetState& set, std::span<const wire::TableRef> tables, Counter counter,
                 uint64_t frame_bytes) {
  const bool rows = counter == &TableCache::bytes_received;
  const auto size = [&](const wire::TableRef& one) {
    return one.row_count * (rows ? one.dim : 1u);
  };
  uint64_t whole = 0;
  for (const wire::TableRef& one : tables) whole += size(one);
  for (const wire::TableRef& one : tables) {
    count_part(set, one.table, counter, size(one), whole, frame_bytes);
  }
}

// By table, what sections of a plain payload take.
std::vector<std::pair<uint32_t, uint64_t>> table_sections(const SetState& set,
                                                          wire::SectionKind kind,
                                                          std::span<const uint8_t> plain) {
  std::vector<std::pair<uint32_t, uint64_t>> found;
  if (plain.empty() || set.tables.empty()) return found;
  try {
    const wire::SectionCounts counts = wire::read_counts(kind, plain);
    if (plain.size() < counts.head_bytes) return found;
    wire::Reader reader(plain.subspan(counts.head_bytes));
    wire::read_block_headers(&reader, counts.blocks, set.layout, kind == wire::SectionKind::kPush);
    for (const auto& header : wire::read_table_headers(&reader, counts.tables, set.layout)) {
      const uint64_t row_bytes =
          sizeof(int64_t) + set.layout.tables[header.table].dim * sizeof(float);
      found.emplace_back(header.table, header.row_count * row_bytes);
    }
  } catch (const Error&) {
    found.clear();  // who reads it all says what is wrong with it
  }
  return found;
}

void count_sections(const SetState& set, std::span<const std::pair<uint32_t, uint64_t>> sections,
                    Counter counter, uint64_t plain_bytes, uint64_t frame_bytes) {
  for (const auto& [table, bytes] : sections) {
    count_part(set, table, counter, bytes, plain_bytes, frame_bytes);
  }
}

}  // namespace

bool is_coded(const SetState& set, const Session& session, uint32_t server) {
  return is_lossy(set.layout) || session.over_network(server);
}

bool orders_rows(const SetState& set, const Session& session, bool clips_norm) {
  bool ordered = clips_norm;
  for (uint32_t s = 0; s < set.server_count; ++s) ordered = ordered || is_coded(set, session, s);
  return ordered;
}

Outbound code_push(const SetState& set, const Session& session, uint32_t server, Buffer plain,
                   wire::WireDType values, const wire::Pool& pool) {
  const uint64_t plain_bytes = plain.size();
  const auto sections = table_sections(set, wire::SectionKind::kPush, plain.bytes());
  Outbound out{std::move(plain), false};
  if (is_coded(set, session, server)) {
    out = {code_sections(wire::SectionKind::kPush, out.payload.bytes(), set.layout,
                         coding_of(set, values, false), pool),
           true};
  }
  count_sections(set, sections, &TableCache::bytes_sent, plain_bytes, out.payload.size());
  return out;
}

Outbound code_pull_for(const SetState& set, const Session& session, uint32_t server, Buffer plain,
                       std::span<const wire::TableRef> asked, bool exact, const wire::Pool& pool) {
  Outbound out{std::move(plain), false};
  if (is_coded(set, session, server)) {
    const wire::Coding coding = coding_of(set, wire::WireDType::kFloat32, exact);
    out = {code_pull(out.payload.bytes(), set.layout, coding, pool), true};
  }
  count_asked(set, asked, &TableCache::bytes_sent, out.payload.size());
  return out;
}

Outbound pull_dense_from(const SetState& set, const Session& session, uint32_t server, bool exact) {
  const uint64_t step = set.step_of_pull();
  if (!is_coded(set, session, server)) return {wire::encode_pull_dense(step), false};
  return {wire::encode_coded_pull_dense(coding_of(set, wire::WireDType::kFloat32, exact), step),
          true};
}

void decode_reply(const SetState& set, wire::SectionKind kind, Request* request,
                  const wire::Pool& pool) {
  const uint64_t frame_bytes = request->reply.payload.size();
  if (std::exchange(request->reply.header.coded, false)) {
    wire::Decoded decoded = wire::decode_sections(kind, request->reply.payload.bytes(), set.layout,
                                                  wire::allocate_from(pool));
    request->reply.payload = std::move(decoded.payload);
  }
  const Buffer& plain = request->reply.payload;
  count_sections(set, table_sections(set, kind, plain.bytes()), &TableCache::bytes_received,
                 plain.size(), frame_bytes);
}

std::vector<std::span<const float>> rows_of_reply(const SetState& set,
                                                  std::span<const wire::TableRef> asked,
                                                  Request* request, const wire::Pool& pool,
                                                  wire::Version* version) {
  wire::Frame& reply = request->reply;
  count_asked(set, asked, &TableCache::bytes_received, reply.payload.size());
  if (!reply.header.coded) return wire::decode_rows(reply.payload.bytes(), asked, version);
  const auto plain = wire::plain_rows_in(reply.payload.bytes());
  if (!plain.empty()) return wire::decode_rows(plain, asked, version);
  reply.payload =
      wire::decode_coded_rows(reply.payload.bytes(), asked, wire::allocate_from(pool)).payload;
  reply.header.coded = false;
  return wire::decode_rows(reply.payload.bytes(), asked, version);
}

}  // namespace cpudist::client
